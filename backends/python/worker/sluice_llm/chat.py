"""Messages of a chat, and its text as content, thoughts and tool calls."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .request import Mistake, parsed


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
        """The content of the next piece; Mistake if a parser fails."""


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


class ChatParsers(Protocol):
    """A model's parsers of chats."""

    def sampling(self, tools: Tools | None) -> dict[str, Any]:
        """Sampling parameters that the parsers need."""

    def readers(
        self, tools: Tools | None, template: Mapping[str, Any], *, stream: bool
    ) -> Callable[[], ChatReader]:
        """A factory of readers, one for each choice; Mistake if the model has no parser of tools.

        `template` has the variables of the chat template, on which thinking may depend.
        """


class NoParsers:
    """The parsers of a model without any: its text is content."""

    def sampling(self, tools: Tools | None) -> dict[str, Any]:
        return {}

    def readers(
        self, tools: Tools | None, template: Mapping[str, Any], *, stream: bool
    ) -> Callable[[], ChatReader]:
        if tools is None:
            return PlainReader
        if not tools.named:
            raise Mistake(
                "'tools' is not supported by this model: no parser reads calls from its text; name "
                "the function in 'tool_choice'",
                "UNSUPPORTED",
            )
        return lambda: ForcedToolReader(tools.named)


def readable(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages with one text each; Mistake names an invalid message or part."""
    return [_readable(place, message) for place, message in enumerate(messages)]


def _readable(place: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Mistake(f"message {place} is {json.dumps(message)[:40]}, expected an object")
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
        raise Mistake(
            f"message {place} has the part {json.dumps(part)[:40]}, but this model takes only "
            "parts of the type text"
        )
    return text


def _with_arguments(place: int, call: Any) -> Any:
    """The call with parsed arguments; arguments that are no text stay unchanged."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    subject = f"message {place} has a tool call whose arguments are"
    arguments = parsed(subject, function["arguments"] or "{}")
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
