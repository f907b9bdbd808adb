"""Messages of a chat, and parsers of its text into content, thoughts and tool calls."""

import inspect
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .request import Refusal, clean

NO_TOOLS = (
    "'tools' is not supported by this model: its parameter 'tool_call_parser' names no parser that "
    "reads calls from its text"
)

READ_OF_TOOLS = ("name", "description", "parameters")


@dataclass(frozen=True)
class ToolCall:
    """A piece of a call: the first piece has a name, the arguments are JSON in pieces."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatPiece:
    """The content, thoughts and calls in a piece of text."""

    content: str = ""
    thoughts: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call: any of them, or the `named` one alone."""

    definitions: Sequence[Mapping[str, Any]]
    named: str = ""
    parallel: bool = True


class ChatReader(Protocol):
    """Reads the text of one choice, in pieces or, without a stream, at once."""

    def read(self, text: str, *, final: bool) -> ChatPiece:
        """The content of the next piece; Refusal if a parser fails."""


class PlainReader:
    """Text as content."""

    def read(self, text: str, *, final: bool) -> ChatPiece:
        return ChatPiece(text)


class ForcedToolReader:
    """Text as the arguments of the one tool that the client names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, text: str, *, final: bool) -> ChatPiece:
        name, self._name = self._name, ""
        return ChatPiece(calls=(ToolCall(0, name, text),)) if text or name else ChatPiece()


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
            raise Refusal(f"the text cannot be read: {clean(error)}", "INTERNAL") from error
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
        """A factory of readers, one for each choice; Refusal if the model has no parser of tools.

        `template` has the variables of the chat template, on which thinking may depend.
        """
        if tools is not None and tools.named:
            return lambda: ForcedToolReader(tools.named)
        definitions = [] if tools is None else self._defined(tools)
        with_tools = None if tools is None else self.tools
        if self.thoughts is None and with_tools is None:
            return PlainReader
        return lambda: ParsedReader(
            self.thoughts and self.thoughts(template),
            with_tools and with_tools(),
            definitions,
            stream=stream,
            parallel=tools is None or tools.parallel,
        )

    def _defined(self, tools: Tools) -> list[Any]:
        if self.tools is None or self.definition is None:
            raise Refusal(NO_TOOLS, "UNSUPPORTED")
        try:
            return [self.definition(**_bare(each)) for each in tools.definitions]
        except (TypeError, ValueError) as error:  # those of pydantic are ValueErrors
            raise Refusal(f"'tools' are refused: {clean(error)}") from error


def load_parsers(thoughts: str, tools: str) -> Parsers:
    """The library's parsers of these names, "" for none; Refusal if a parser is unknown."""
    try:
        make_thoughts, raw_thoughts = _of_thoughts(thoughts)
        make_tools, raw_tools, definition = _of_tools(tools)
    except (ImportError, ValueError) as error:
        names = " and ".join(f"'{each}'" for each in (thoughts, tools) if each)
        raise Refusal(f"tensorrt_llm has no parser {names}: {clean(error)}") from error
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


def readable(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages with one text each; Refusal names an invalid message or part."""
    return [_readable(place, message) for place, message in enumerate(messages)]


def _readable(place: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Refusal(f"message {place} is {json.dumps(message)[:40]}, expected an object")
    found = dict(message)
    if isinstance(content := found.get("content"), list):
        found["content"] = "\n".join(_text(place, part) for part in content)
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_with_arguments(place, call) for call in calls]
    return found


def _text(place: int, part: Any) -> str:
    """The text of a part, which may also be the text itself."""
    text = part
    if isinstance(part, dict):
        text = part.get("text") if part.get("type") == "text" else None
    if not isinstance(text, str):
        raise Refusal(
            f"message {place} has the part {json.dumps(part)[:40]}, but TensorRT-LLM models take "
            "only parts of the type text"
        )
    return text


def _with_arguments(place: int, call: Any) -> Any:
    """The call with parsed arguments; arguments that are no text stay unchanged."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise Refusal(
            f"message {place} has a tool call whose arguments are not valid JSON: {error}"
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def message(said: ChatPiece) -> dict[str, Any]:
    """The whole message; `reasoning` is vLLM's name for thoughts."""
    found: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.thoughts:
        found["reasoning"] = said.thoughts
    if said.calls:
        found["content"] = said.content or None
        found["tool_calls"] = [_call(each) for each in said.calls]
    return found


def delta(said: ChatPiece) -> dict[str, Any]:
    """The new parts of a message; empty if there are none."""
    found: dict[str, Any] = {"content": said.content} if said.content else {}
    if said.thoughts:
        found["reasoning"] = said.thoughts
    if said.calls:
        found["tool_calls"] = _pieces(said.calls)
    return found


def _pieces(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Pieces of calls; the first piece of a call has its name and id."""
    return [
        {"index": each.index, **_call(each)}
        if each.name
        else {"index": each.index, "function": {"arguments": each.arguments}}
        for each in calls
    ]


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
