"""What does the text of a chat say? An answer, thoughts, calls of tools: the library reads it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import Refusal, clean

NO_TOOLS = (
    "'tools' is not supported by this model: its parameter 'tool_call_parser' names no parser that "
    "reads calls from its text"
)

READ_OF_TOOLS = ("name", "description", "parameters")


@dataclass(frozen=True)
class Call:
    """A piece of a call: it begins where it has a name, the arguments are JSON in pieces."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """What a piece of text says."""

    content: str = ""
    thoughts: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Tools:
    """What a client lets the model call: any of them, or the `named` one alone."""

    definitions: Sequence[Mapping[str, Any]]
    named: str = ""
    parallel: bool = True


class Reader(Protocol):
    """Reads the text of one choice, piece by piece or, if it is not streamed, at once."""

    def read(self, text: str, *, final: bool) -> Said:
        """What the next piece says; Refusal if a parser fails."""


class Plain:
    """Text is the answer."""

    def read(self, text: str, *, final: bool) -> Said:
        return Said(text)


class Forced:
    """Text is the arguments of the one tool that the client wants."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, text: str, *, final: bool) -> Said:
        name, self._name = self._name, ""
        return Said(calls=(Call(0, name, text),)) if text or name else Said()


class Parsed:
    """Text is read by parsers of the library's, either of which may be None."""

    def __init__(
        self, thoughts: Any, tools: Any, definitions: Sequence[Any], *, stream: bool, parallel: bool
    ) -> None:
        self._thoughts, self._tools = thoughts, tools
        self._definitions = definitions
        self._stream, self._parallel = stream, parallel
        self._fed = self._told = ""
        self._called = False

    def read(self, text: str, *, final: bool) -> Said:
        try:
            content, thoughts = self._think(text, final)
            content, calls = self._call(content, final)
        except Exception as error:  # a parser is anybody's code
            raise Refusal(f"the text cannot be read: {clean(error)}", "INTERNAL") from error
        return Said(content, thoughts, calls if self._parallel else _first(calls))

    def _think(self, text: str, final: bool) -> tuple[str, str]:
        if self._thoughts is None:
            return text, ""
        if not self._stream:
            found = self._thoughts.parse(text)
            return found.content, found.reasoning_content
        found = self._thoughts.parse_delta(text)
        content, thoughts = found.content, found.reasoning_content
        if final and (finish := getattr(self._thoughts, "finish", None)):
            rest = finish()  # some versions of the library hold nothing back
            content, thoughts = content + rest.content, thoughts + rest.reasoning_content
        return content, thoughts

    def _call(self, text: str, final: bool) -> tuple[str, tuple[Call, ...]]:
        if self._tools is None:
            return text, ()
        if not self._stream:
            found = self._tools.detect_and_parse(text, self._definitions)
            named = enumerate(each for each in found.calls if each.name)
            return found.normal_text, tuple(Call(n, e.name, e.parameters) for n, e in named)
        found = self._tools.parse_streaming_increment(text, self._definitions)
        calls = tuple(Call(e.tool_index, e.name or "", e.parameters) for e in found.calls)
        return self._with_rest(text, found.normal_text, calls, final), calls

    def _with_rest(self, text: str, content: str, calls: Sequence[Call], final: bool) -> str:
        """What looked like the beginning of a call, and was none when the text ended, is text."""
        self._called = self._called or bool(calls)
        self._fed, self._told = self._fed + text, self._told + content
        if final and not self._called and self._fed.startswith(self._told):
            content += self._fed.removeprefix(self._told)
        return content


@dataclass(frozen=True)
class Parsers:
    """What makes the parsers of a model, None where it has none; `definition` reads one tool.

    Some parsers look for special tokens (`raw_thoughts`, `raw_tools`), which no text has otherwise.
    """

    thoughts: Callable[[Mapping[str, Any]], Any] | None = None
    raw_thoughts: bool = False
    tools: Callable[[], Any] | None = None
    raw_tools: bool = False
    definition: Callable[..., Any] | None = None

    def sampling(self, tools: Tools | None) -> dict[str, Any]:
        """How texts are to be made so that they can be read."""
        with_tools = tools is not None and not tools.named
        raw = self.raw_thoughts or (self.raw_tools and with_tools)
        return {"skip_special_tokens": False} if raw else {}

    def readers(
        self, tools: Tools | None, template: Mapping[str, Any], *, stream: bool
    ) -> Callable[[], Reader]:
        """What makes a reader for each choice; Refusal if the tools cannot be had.

        `template` has the variables of the chat template, on which thinking may depend.
        """
        if tools is not None and tools.named:
            return lambda: Forced(tools.named)
        definitions = [] if tools is None else self._defined(tools)
        with_tools = None if tools is None else self.tools
        if self.thoughts is None and with_tools is None:
            return Plain
        return lambda: Parsed(
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
    """The library's parsers of these names, "" for none; Refusal if it has no such parser."""
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
    """Older versions of the library do not say."""
    return bool(getattr(parser, "needs_raw_special_tokens", False))


def _bare(tool: Mapping[str, Any]) -> dict[str, Any]:
    """What parsers read of a tool; the library refuses members that it does not know."""
    function = {name: value for name, value in tool["function"].items() if name in READ_OF_TOOLS}
    return {"type": "function", "function": function}


def _first(calls: Sequence[Call]) -> tuple[Call, ...]:
    return tuple(each for each in calls if each.index == 0)
