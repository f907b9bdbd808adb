"""Tensors and responses as parts of a message."""

import json
from collections.abc import Container, Sequence
from typing import Any

from .connection import Buffer, GatewayConnection
from .errors import ErrorCode, TritonError
from .response import InferenceResponse
from .segments import SHARED_FROM_BYTES
from .tensor import Tensor

INLINE_BYTES = 16 << 20
"""Bytes of large tensors that a message may hold if no further segment can be made."""


class Packing:
    """The body of one message, in the order of its header."""

    __slots__ = ("_connection", "_placed", "buffers")

    def __init__(self, connection: GatewayConnection) -> None:
        self._connection = connection
        self._placed: tuple[int, ...] = ()
        self.buffers: list[Buffer] = []

    def tensor(self, tensor: Tensor) -> list[Any]:
        """A tensor for the header; its bytes into the body or a segment.

        OSError if there is no memory for a segment.
        """
        datatype, shape, data = tensor.wire()
        size = len(data)
        if size < SHARED_FROM_BYTES:
            self.buffers.append(data)
            return [tensor.name(), datatype, shape, size, 0]
        return [tensor.name(), datatype, shape, size, self._place(data)]

    def _place(self, data: Buffer) -> int:
        try:
            number = self._connection.outgoing.place(memoryview(data))
        except OSError:
            # Without a free file descriptor a few tensors go into the message.
            if sum([len(each) for each in self.buffers]) + len(data) > INLINE_BYTES:
                raise
            self.buffers.append(data)
            return 0
        self._placed += (number,)
        return number

    def give_back(self, begun: int = 0) -> None:
        """Free the segments after the first `begun`: no message has named them."""
        self._connection.outgoing.freed(self._placed[begun:])
        self._placed = self._placed[:begun]

    def response(self, response: InferenceResponse, wanted: Container[str]) -> list[Any]:
        """A response for the header, with the wanted ones of its outputs."""
        error = response.error()
        parameters = response.given_parameters
        if error is not None:
            return [[], [error.code().name, error.message()], parameters]
        begun, placed = len(self.buffers), len(self._placed)
        try:
            outputs = [
                self.tensor(each) for each in response.output_tensors() if each.name() in wanted
            ]
        except OSError as failure:
            del self.buffers[begun:]
            self.give_back(placed)
            text = f"no memory to share for the outputs: {failure.strerror}"
            return [[], [ErrorCode.INTERNAL.name, text], parameters]
        return [outputs, None, parameters]


class Unpacking:
    """Cuts the body of one message, in the order of its header."""

    __slots__ = ("_body", "_connection", "_start")

    def __init__(self, connection: GatewayConnection, body: memoryview) -> None:
        self._connection, self._body = connection, body
        self._start = 0

    def tensors(self, headers: Sequence[Any]) -> list[Tensor]:
        """The next tensors; each segment is viewed at once, or it would never be released."""
        found = []
        for name, datatype, shape, size, segment in headers:
            if segment:
                data = self._connection.incoming.view(segment, size)
            else:
                data = self._body[self._start : self._start + size]
                self._start += size
            found.append(Tensor.received(name, datatype, shape, data))
        return found

    def response(self, header: Any) -> InferenceResponse:
        """A response of another model; an empty one for the final flag alone."""
        if header is None:
            return InferenceResponse()
        outputs, error, parameters = header
        failure = None if error is None else TritonError(error[1], ErrorCode[error[0]])
        response = InferenceResponse(self.tensors(outputs), failure)
        response.given_parameters = parameters
        return response


def parsed(header: bytes) -> Any:
    """A header from its bytes; lone surrogates are kept."""
    return json.loads(header.decode(errors="surrogatepass"))
