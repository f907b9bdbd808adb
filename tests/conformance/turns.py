"""Turns of conversations as messages of gRPC: how they are asked, cancelled and read."""

import json
from typing import Any

from tests.rpc import StreamRpc, infer_request

FINAL = "triton_final_response"


def messages(*texts: str) -> str:
    """The turn of a client, as the JSON of messages."""
    return json.dumps([{"role": "user", "content": each} for each in texts])


def ask(
    said: str,
    request_id: str = "",
    conversation: int | str = 0,
    *,
    model: str = "chatting",
    start: bool = False,
    end: bool = False,
) -> Any:
    """A turn, or without a conversation an ordinary request."""
    request = infer_request(model, request_id, messages=messages(said))
    if conversation:
        kind = "string_param" if isinstance(conversation, str) else "int64_param"
        setattr(request.parameters["sequence_id"], kind, conversation)
    request.parameters["sequence_start"].bool_param = start
    request.parameters["sequence_end"].bool_param = end
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def stop(request_id: str, model: str = "chatting") -> Any:
    """The message that cancels a request."""
    request = infer_request(model, request_id)
    request.parameters["cancel"].bool_param = True
    return request


def said(answer: Any) -> str:
    """The text of an answer; nothing if it is only a flag."""
    contents = answer.infer_response.raw_output_contents
    return contents[0][4:].decode() if contents else ""


def flags(answer: Any) -> tuple[bool, bool]:
    """Whether it is the last, and whether because its request was cancelled."""
    parameters = answer.infer_response.parameters
    return parameters[FINAL].bool_param, "cancelled" in parameters


def whole(rpc: StreamRpc) -> str:
    """The text of one request's answer, to its end; no other must be under way."""
    found = ""
    while True:
        answer = rpc.answer()
        assert answer.error_message == ""
        found += said(answer)
        if flags(answer)[0]:
            return found
