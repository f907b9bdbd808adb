"""The library's parsers of a chat's text: thoughts and tool calls."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_llm.chat import (
    ChatPiece,
    ChatReader,
    ForcedToolReader,
    PlainReader,
    ToolCall,
    Tools,
)
from sluice_llm.request import Mistake, clean

READ_OF_TOOLS = ("name", "description", "parameters")


class ParsedReader:
    """Text read by the library's parsers, either of which may be None."""

    def __init__(
        self, thoughts: Any, tools: Any, definitions: Sequence[Any], *, stream: bool, parallel: bool
    ) -> None:
        self._thoughts, self._tools = thoughts, tools
        self._definitions = definitions
        self._stream, self._parallel = stream, parallel
        self._fed = self._sent = ""
        self._called = False

    def read(self, text: str, *, final: bool) -> ChatPiece:
        try:
            content, thoughts = self._think(text, final)
            content, calls = self._call(content, final)
        except Exception as error:  # a parser is foreign code
            raise Mistake(f"the text cannot be read: {clean(error)}", "INTERNAL") from error
        return ChatPiece(content, thoughts, calls if self._parallel else _first(calls))

    def _think(self, text: str, final: bool) -> tuple[str, str]:
        if self._thoughts is None:
            return text, ""
        if not self._stream:
            found = self._thoughts.parse(text)
            return found.content, found.reasoning_content
        found = self._thoughts.parse_delta(text)
        content, thoughts = found.content, found.reasoning_content
        if final and (finish := getattr(self._thoughts, "finish", None)):
            rest = finish()  # absent in some versions of the library
            content, thoughts = content + rest.content, thoughts + rest.reasoning_content
        return content, thoughts

    def _call(self, text: str, final: bool) -> tuple[str, tuple[ToolCall, ...]]:
        if self._tools is None:
            return text, ()
        if not self._stream:
            found = self._tools.detect_and_parse(text, self._definitions)
            named = enumerate(each for each in found.calls if each.name)
            return found.normal_text, tuple(ToolCall(n, e.name, e.parameters) for n, e in named)
        found = self._tools.parse_streaming_increment(text, self._definitions)
        calls = tuple(ToolCall(e.tool_index, e.name or "", e.parameters) for e in found.calls)
        return self._with_rest(text, found.normal_text, calls, final), calls

    def _with_rest(self, text: str, content: str, calls: Sequence[ToolCall], final: bool) -> str:
        """Content with held-back text that proved to be no call."""
        self._called = self._called or bool(calls)
        self._fed, self._sent = self._fed + text, self._sent + content
        if final and not self._called and self._fed.startswith(self._sent):
            content += self._fed.removeprefix(self._sent)
        return content


@dataclass(frozen=True)
class Parsers:
    """Factories of a model's parsers, None without one; `definition` reads one tool.

    Some parsers need special tokens in the text (`raw_thoughts`, `raw_tools`).
    """

    thoughts: Callable[[Mapping[str, Any]], Any] | None = None
    raw_thoughts: bool = False
    tools: Callable[[], Any] | None = None
    raw_tools: bool = False
    definition: Callable[..., Any] | None = None

    def sampling(self, tools: Tools | None) -> dict[str, Any]:
        """Sampling parameters that the parsers need."""
        with_tools = tools is not None and not tools.named
        raw = self.raw_thoughts or (self.raw_tools and with_tools)
        return {"skip_special_tokens": False} if raw else {}

    def readers(
        self, tools: Tools | None, template: Mapping[str, Any], *, stream: bool
    ) -> Callable[[], ChatReader]:
        """A factory of readers, one for each choice; Mistake if the model has no parser of tools.

        `template` has the variables of the chat template, on which thinking may depend.
        """
        if tools is not None and tools.named:
            return lambda: ForcedToolReader(tools.named)
        definitions = [] if tools is None else self._defined(tools)
        with_tools = None if tools is None else self.tools
        if self.thoughts is None and with_tools is None:
            return lambda: PlainReader()
        return lambda: ParsedReader(
            self.thoughts and self.thoughts(template),
            with_tools and with_tools(),
            definitions,
            stream=stream,
            parallel=tools is None or tools.parallel,
        )

    def _defined(self, tools: Tools) -> list[Any]:
        if self.tools is None or self.definition is None:
            raise Mistake(
                "'tools' is not supported by this model: its parameter 'tool_call_parser' names no "
                "parser that reads calls from its text; name the function in 'tool_choice'",
                "UNSUPPORTED",
            )
        try:
            return [self.definition(**_bare(each)) for each in tools.definitions]
        except (TypeError, ValueError) as error:  # those of pydantic are ValueErrors
            raise Mistake(f"'tools' are refused: {clean(error)}") from error


def load_parsers(thoughts: str, tools: str) -> Parsers:
    """The library's parsers of these names, "" for none; Mistake if a parser is unknown."""
    try:
        make_thoughts, raw_thoughts = _of_thoughts(thoughts)
        make_tools, raw_tools, definition = _of_tools(tools)
    except (ImportError, ValueError) as error:
        names = " and ".join(f"'{each}'" for each in (thoughts, tools) if each)
        raise Mistake(f"tensorrt_llm has no parser {names}: {clean(error)}") from error
    return Parsers(make_thoughts, raw_thoughts, make_tools, raw_tools, definition)


def _of_thoughts(name: str) -> tuple[Callable[[Mapping[str, Any]], Any] | None, bool]:
    if not name:
        return None, False
    from tensorrt_llm.llmapi.reasoning_parser import ReasoningParserFactory

    create = ReasoningParserFactory.create_reasoning_parser
    raw = _looks_for_special_tokens(create(name))
    if "chat_template_kwargs" in inspect.signature(create).parameters:
        return lambda template: create(name, dict(template)), raw
    return lambda _: create(name), raw


def _of_tools(name: str) -> tuple[Callable[[], Any] | None, bool, Callable[..., Any] | None]:
    if not name:
        return None, False, None
    from tensorrt_llm.serve.openai_protocol import ChatCompletionToolsParam
    from tensorrt_llm.serve.tool_parser.tool_parser_factory import ToolParserFactory

    create = ToolParserFactory.create_tool_parser
    return lambda: create(name), _looks_for_special_tokens(create(name)), ChatCompletionToolsParam


def _looks_for_special_tokens(parser: Any) -> bool:
    """Whether a parser needs special tokens; older versions of the library do not define it."""
    return bool(getattr(parser, "needs_raw_special_tokens", False))


def _bare(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a tool that parsers read; the library refuses unknown members."""
    function = {name: value for name, value in tool["function"].items() if name in READ_OF_TOOLS}
    return {"type": "function", "function": function}


def _first(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(each for each in calls if each.index == 0)
