"""Messages as chat templates read them: texts, and calls of tools with their arguments parsed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .refusals import Refusal


def readable(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages with one text each; Refusal names what is no message, or no text."""
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
    """A part may also be the text itself."""
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
    """A call whose arguments are no text is left to the template."""
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
