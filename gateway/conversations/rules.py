"""Which models keep conversations, and what is a turn of one?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import orjson

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.generation import EXCLUDE_INPUT, MESSAGES, TEXT_OUTPUT
from gateway.messages import InferRequest, InferResponse, SequenceTag
from gateway.models.limits import ConversationLimits
from gateway.tensor import Buffer, Datatype, Tensor, element_spans


def converses(config: ModelConfig) -> bool:
    """Whether requests of one correlation id are the turns of a conversation.

    With a sequence batcher they are Triton's sequences, and without room for a conversation the
    model itself is told the id.
    """
    return (
        config.sequence_batching is None
        and _has_text(config.input, MESSAGES)
        and _has_text(config.output, TEXT_OUTPUT)
        and ConversationLimits.read(config).count > 0
    )


class AskedTurn(NamedTuple):
    """What makes a request a turn: its place in a conversation, and its messages."""

    tag: SequenceTag
    messages: Tensor


def asked_turn(request: InferRequest, config: ModelConfig) -> AskedTurn | None:
    """The turn that a request asks for; None for a request outside of conversations."""
    tag = request.sequence
    if tag is None or not tag.correlation_id:
        return None
    messages = request.input(MESSAGES)
    if messages is None or messages.datatype is not Datatype.BYTES or not converses(config):
        return None
    return AskedTurn(tag, messages)


def _has_text(tensors: Sequence[ModelInput | ModelOutput], name: str) -> bool:
    return any(each.name == name and each.data_type is DataType.TYPE_STRING for each in tensors)


def read_messages(request: InferRequest, given: Tensor, limit: int) -> bytes:
    """The messages that a turn adds: the JSON of their list as the client wrote it, unbracketed.

    INVALID_ARG if it has more than `limit` bytes, if it is no list of at least one object, or if
    the turn's answer would not be the text that the model adds.
    """
    text = _only(given).strip()
    if len(text) > limit:
        raise invalid(
            f"input '{MESSAGES}' has {len(text)} bytes, and a conversation at most {limit}"
        )
    try:
        messages = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid(f"input '{MESSAGES}' is not valid JSON: {error}") from None
    if not isinstance(messages, list):
        raise invalid(f"input '{MESSAGES}' is JSON, but a list is expected in it")
    if not messages or not all(isinstance(each, dict) for each in messages):
        raise invalid(
            f"input '{MESSAGES}' of a turn is expected to be a list of at least one message, each "
            "an object"
        )
    _insist_on_answer(request)
    return text[1:-1].strip()


def with_messages(request: InferRequest, messages: bytes) -> InferRequest:
    """The request as the model gets it: all that was said in place of the turn's own messages."""
    inputs = tuple(
        Tensor(each.name, each.datatype, each.shape, (messages,)) if each.name == MESSAGES else each
        for each in request.inputs
    )
    return replace(request, inputs=inputs, sequence=None)


def said(response: InferResponse) -> Buffer:
    """What a response adds to the answer, in UTF-8; of several sequences the first."""
    output = response.output(TEXT_OUTPUT)
    if output is None:
        return b""
    if isinstance(output.data, tuple):
        return output.data[0] if output.data else b""
    data = output.raw()
    for start, end in element_spans(data):
        return memoryview(data)[start:end]
    return b""


def invalid(message: str) -> InferenceError:
    """The error for a client's mistake."""
    return InferenceError(Code.INVALID_ARG, message)


def _only(tensor: Tensor) -> bytes:
    elements = tensor.elements()
    if len(elements) != 1:
        raise invalid(f"input '{tensor.name}' has {len(elements)} elements, expected 1")
    return bytes(elements[0])


def _insist_on_answer(request: InferRequest) -> None:
    exclude = request.input(EXCLUDE_INPUT)
    if exclude is not None and not any(exclude.raw()):
        raise invalid(
            f"input '{EXCLUDE_INPUT}' of a turn is false, expected true or nothing: its answer "
            "would repeat the conversation"
        )
    if request.outputs and all(each.name != TEXT_OUTPUT for each in request.outputs):
        raise invalid(
            f"the outputs asked for do not have '{TEXT_OUTPUT}', which a turn is remembered by"
        )
