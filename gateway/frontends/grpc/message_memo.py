"""Memo of parsed ModelInfer messages, because clients repeat them with other data.

While shapes stay the same, only the raw contents at the end of a message change.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from gateway.frontends.grpc.protobuf_wire import LARGE_BYTES, RAW_INPUT, parse_request, sized
from gateway.messages import Deadline, InferRequest
from gateway.policy.caller import Caller
from gateway.protos import grpc_service_pb2 as pb
from gateway.request_memo import MOST_BYTES, RequestMemo
from gateway.tensor import Buffer, Datatype, Tensor


class InputSlice(NamedTuple):
    """An input and the offsets of its data; `mark` is the tag and length before the data."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    start: int
    end: int
    mark: bytes


class MemoEntry(NamedTuple):
    """The decoded request `asked` of a header, without its data."""

    asked: InferRequest
    pieces: Sequence[InputSlice]

    def fits(self, data: bytes) -> bool:
        """Whether the raw contents of a message with the same header have the same lengths."""
        if len(data) != self.pieces[-1].end:
            return False
        for _, _, _, start, _, mark in self.pieces:  # noqa: SIM110 - a generator costs more
            if not data.endswith(mark, 0, start):
                return False
        return True

    def request(
        self, data: bytes, caller: Caller | None = None, deadline: Deadline | None = None
    ) -> InferRequest:
        """The request of a caller's message with these bytes."""
        asked = self.asked
        return InferRequest(
            model=asked.model,
            version=asked.version,
            inputs=tuple(
                [
                    Tensor(name, datatype, shape, data[start:end])
                    for name, datatype, shape, start, end, _ in self.pieces
                ]
            ),
            outputs=asked.outputs,
            parameters=asked.parameters,
            priority=asked.priority,
            timeout_us=asked.timeout_us,
            received_ns=time.perf_counter_ns(),
            caller=caller,
            deadline=deadline,
        )


class InferMessage(NamedTuple):
    """A message with its entry in the memo, or else with its parsed parts."""

    data: bytes
    known: MemoEntry | None = None
    message: pb.ModelInferRequest | None = None
    raw: Any = ()


class MessageMemo:
    """The latest decoded messages, by their headers: all bytes before the raw contents.

    A message is added only after another message of the same length, because changing shapes
    rarely repeat. All entries of one length of message have the same length of header.
    """

    def __init__(self) -> None:
        self._known: RequestMemo[bytes, MemoEntry] = RequestMemo()
        self._headers: RequestMemo[int, int] = RequestMemo()

    def parse(self, data: bytes) -> InferMessage:
        """The message; DecodeError for bytes that are not one."""
        known = self._known.get(data[: self._headers.get(len(data), 0)])
        if known is not None and known.fits(data):
            return InferMessage(data, known)
        return InferMessage(data, None, *parse_request(data))

    def add(self, incoming: InferMessage, request: InferRequest) -> None:
        """Add an accepted message.

        Skipped are messages with an id, a sequence, strings or shared memory, since more than
        their raw contents can change.
        """
        data, _, message, raw = incoming
        if message is None or len(data) >= LARGE_BYTES or not self._has_come_before(len(data)):
            return
        header, marks = _cut(data, raw)
        if self._headers[len(data)] not in (0, len(header)) or len(header) > MOST_BYTES:
            return
        if not _is_plain(message, raw, request):
            return
        known = MemoEntry(
            replace(request, inputs=(), trace=None, caller=None, deadline=None, receipt=None),
            tuple(_pieces(len(header), marks, raw, request)),
        )
        if known.fits(data) and _is_all_but_raw(header, message):
            self._known[header] = known
            self._headers[len(data)] = len(header)

    def _has_come_before(self, size: int) -> bool:
        if size in self._headers:
            return True
        self._headers[size] = 0
        return False


def _cut(data: bytes, raw: Sequence[Buffer]) -> tuple[bytes, Sequence[bytes]]:
    """The header of a message whose raw contents are at its end, and the marks of these."""
    marks = [sized(bytes([RAW_INPUT]), len(each)) for each in raw]
    size = sum(map(len, marks)) + sum(map(len, raw))
    return data[: len(data) - size], marks


def _pieces(
    end: int, marks: Sequence[bytes], raw: Sequence[Buffer], request: InferRequest
) -> Iterator[InputSlice]:
    for tensor, mark, each in zip(request.inputs, marks, raw, strict=True):
        start = end + len(mark)
        end = start + len(each)
        yield InputSlice(tensor.name, tensor.datatype, tensor.shape, start, end, mark)


def _is_plain(message: pb.ModelInferRequest, raw: Sequence[Buffer], request: InferRequest) -> bool:
    return (
        0 < len(raw) == len(request.inputs)
        and not request.id
        and request.sequence is None
        and not any(tensor.datatype is Datatype.BYTES for tensor in request.inputs)
        and not any(tensor.parameters for tensor in message.inputs)
        and not any(output.region for output in request.outputs)
    )


def _is_all_but_raw(header: bytes, message: pb.ModelInferRequest) -> bool:
    """Whether the header holds all fields except the raw contents."""
    rest = pb.ModelInferRequest()
    rest.CopyFrom(message)
    rest.ClearField("raw_input_contents")
    try:
        return pb.ModelInferRequest.FromString(header) == rest
    except DecodeError:
        return False
