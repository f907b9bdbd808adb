"""Calls are JSON between two marks, as with `qwen3`."""

import json
from typing import ClassVar

from tensorrt_llm.serve.openai_protocol import ChatCompletionToolsParam
from tensorrt_llm.serve.tool_parser.core_types import StreamingParseResult, ToolCallItem

BEGIN, END = "<tool_call>", "</tool_call>"


class Qwen3ToolParser:
    """A call is sent in two pieces; the possible start of a mark is held back, also at the end."""

    def __init__(self) -> None:
        self._buffer = ""
        self._number = 0

    def detect_and_parse(
        self, text: str, tools: list[ChatCompletionToolsParam]
    ) -> StreamingParseResult:
        before, *rest = text.split(BEGIN)
        pieces = [each.partition(END)[0] for each in rest]
        calls = [self._item(-1, json.loads(each), tools) for each in pieces]
        return StreamingParseResult(before.strip() if calls else before, calls)

    def parse_streaming_increment(
        self, new_text: str, tools: list[ChatCompletionToolsParam]
    ) -> StreamingParseResult:
        self._buffer += new_text
        before, begin, rest = self._buffer.partition(BEGIN)
        if not begin:
            held = next((n for n in range(len(BEGIN), 0, -1) if before.endswith(BEGIN[:n])), 0)
            cut = len(before) - held
            self._buffer = before[cut:]
            return StreamingParseResult(before[:cut])
        inside, end, after = rest.partition(END)
        if not end:
            self._buffer = begin + rest
            return StreamingParseResult(before)
        whole = self._item(self._number, json.loads(inside), tools)
        self._buffer, self._number = after, self._number + 1
        name = ToolCallItem(whole.tool_index, "", whole.name)
        return StreamingParseResult(
            before, [name, ToolCallItem(whole.tool_index, whole.parameters)]
        )

    def _item(
        self, index: int, call: dict[str, object], tools: list[ChatCompletionToolsParam]
    ) -> ToolCallItem:
        assert call["name"] in [each.function.name for each in tools]
        return ToolCallItem(index, json.dumps(call["arguments"]), str(call["name"]))


class ToolParserFactory:
    parsers: ClassVar[dict[str, type]] = {"qwen3": Qwen3ToolParser}

    @staticmethod
    def create_tool_parser(tool_parser: str) -> Qwen3ToolParser:
        try:
            return ToolParserFactory.parsers[tool_parser.lower()]()
        except KeyError as e:
            raise ValueError(
                f"Invalid tool_parser: {tool_parser}\n"
                f"Supported parsers: {list(ToolParserFactory.parsers.keys())}"
            ) from e
