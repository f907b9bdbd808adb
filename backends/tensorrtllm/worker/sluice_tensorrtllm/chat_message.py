"""What a chat's choice says, as OpenAI's clients read it: the message, or a delta of it."""

import uuid
from collections.abc import Sequence
from typing import Any

from .parsers import Call, Said


def message(said: Said) -> dict[str, Any]:
    """All of it; `reasoning` is the name that vLLM gives to thoughts."""
    found: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.thoughts:
        found["reasoning"] = said.thoughts
    if said.calls:
        found["content"] = said.content or None
        found["tool_calls"] = [_call(each) for each in said.calls]
    return found


def delta(said: Said) -> dict[str, Any]:
    """What is new; empty if nothing is."""
    found: dict[str, Any] = {"content": said.content} if said.content else {}
    if said.thoughts:
        found["reasoning"] = said.thoughts
    if said.calls:
        found["tool_calls"] = _pieces(said.calls)
    return found


def _pieces(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """A call has its name and its id where it begins."""
    return [
        {"index": each.index, **_call(each)}
        if each.name
        else {"index": each.index, "function": {"arguments": each.arguments}}
        for each in calls
    ]


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
