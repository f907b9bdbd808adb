"""Messages of a chat, for templates and for OpenAI's clients."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import Refusal
from .parsers import ChatPiece, ToolCall


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
