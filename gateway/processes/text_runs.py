"""Runs of responses with one text each, as those of tokens, in one message.

A response of its own costs both processes four times as much.
"""

from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, responses_of_texts
from gateway.processes.inference_messages import LARGE_BYTES, MOST_DIMS, read_length
from gateway.tensor import LENGTH_BYTES, Datatype, Tensor

RUN_BYTES = 32 << 10
"""The size from which a run takes no further text; a large one is in no run."""

_Dims = Annotated[tuple[Annotated[int, Meta(ge=1, le=1)], ...], Meta(max_length=MOST_DIMS)]
_Tokens = Annotated[int, Meta(ge=0)] | None


class TextRun(msgspec.Struct, array_like=True, gc=False):
    """Texts of an output, and the completion tokens of each; None for one without usage."""

    name: str
    shape: _Dims
    texts: Annotated[tuple[bytes, ...], Meta(min_length=1)]
    tokens: tuple[_Tokens, ...]

    def responses(self) -> Sequence[InferResponse]:
        """The responses, at least one."""
        return responses_of_texts(self.name, self.texts, self.tokens, self.shape)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TextRun).decode


def take_run(responses: deque[InferResponse]) -> bytes | None:
    """The leading responses with a text of the same output, removed, as bytes; None if none has."""
    first: Tensor | None = None
    size = 0
    texts: list[bytes] = []
    tokens: list[int | None] = []
    while responses and size < RUN_BYTES:
        response = responses[0]
        text = _text(response)
        if text is None:
            break
        output, usage = response.outputs[0], response.usage
        if first is None:
            first = output
        elif output.name != first.name or output.shape != first.shape:
            break
        texts.append(text)
        tokens.append(None if usage is None else usage.completion_tokens)
        size += len(text)
        responses.popleft()
    if first is None:
        return None
    return _encode(TextRun(first.name, first.shape, tuple(texts), tuple(tokens)))


def read_run(payload: bytes) -> TextRun:
    """The run that `take_run` encoded; InferenceError for other bytes."""
    try:
        found = _decode(payload)
        if len(found.texts) != len(found.tokens):
            raise ValueError(f"{len(found.texts)} texts with {len(found.tokens)} numbers of tokens")
    except ValueError as error:
        text = f"malformed texts of another process: {error}"
        raise InferenceError(Code.INTERNAL, text) from error
    return found


def read_plain_run(payload: bytes) -> TextRun | None:
    """As `read_run`; None unless each response is a `response_of_text`, and for other bytes."""
    try:
        run = read_run(payload)
    except InferenceError:
        return None
    return run if run.shape == (1,) else None


def _text(response: InferResponse) -> bytes | None:
    """The text of a response that has nothing else."""
    usage = response.usage
    if (
        len(response.outputs) != 1
        or response.parameters
        or response.final
        or response.phases is not None
        or response.error is not None
        or (usage is not None and (usage.prompt_tokens or usage.finish_reason))
    ):
        return None
    output = response.outputs[0]
    text = _element(output) if output.datatype is Datatype.BYTES else None
    return None if text is None or len(text) > LARGE_BYTES else text


def _element(output: Tensor) -> bytes | None:
    """The only element of BYTES; None if there are more, or none."""
    data = output.data
    if prod(output.shape) != 1:
        return None
    if isinstance(data, tuple):
        return data[0]
    if not isinstance(data, bytes) or read_length(data)[0] != len(data) - LENGTH_BYTES:
        return None
    return data[LENGTH_BYTES:]
