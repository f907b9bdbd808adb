"""ModelStreamInfer message by message: a test decides what is asked, and what is read when."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.serving import WAIT_SECS

MAX_SECS = 2 * WAIT_SECS
Metadata = Sequence[tuple[str, str]]


class StreamRpc:
    """One RPC; it reads an answer only when it is asked for one."""

    def __init__(self, stub: Any, metadata: Metadata = (), timeout: float = MAX_SECS) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self._answers = stub.ModelStreamInfer(
            iter(self._requests.get, None), timeout=timeout, metadata=metadata
        )

    def ask(self, *requests: Any) -> None:
        """Send requests."""
        for request in requests:
            self._requests.put(request)

    def half_close(self) -> None:
        """Say that no request will follow."""
        self._requests.put(None)

    def answer(self) -> Any:
        """The next message."""
        return next(self._answers)

    def rest(self) -> list[Any]:
        """Half-close, and read to the end."""
        self.half_close()
        return list(self._answers)

    def until_exit(self) -> list[Any]:
        """Read to the end, which is the error of a stopping server."""
        found: list[Any] = []
        with pytest.raises(grpc.RpcError) as caught:
            found.extend(iter(self.answer, None))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "Server exiting"
        return found

    def error(self) -> tuple[str, str]:
        """Read to the end, which must be an error: its code and text."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self._answers)
        return caught.value.code().name, caught.value.details()

    def cancel(self) -> None:
        """Leave."""
        self._answers.cancel()
        self.half_close()

    @property
    def ended(self) -> bool:
        """Whether the RPC is over."""
        return not self._answers.is_active()


@contextmanager
def streaming(stub: Any, metadata: Metadata = (), timeout: float = MAX_SECS) -> Iterator[StreamRpc]:
    """An RPC that is over after the block."""
    found = StreamRpc(stub, metadata, timeout)
    try:
        yield found
    finally:
        found.cancel()


@contextmanager
def connected(target: str, *, ready: bool = False) -> Iterator[Any]:
    """The service's stub, on a connection of its own and without limits of the message size.

    With `ready` the connection is made at once: no deadline passes meanwhile.
    """
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    with grpc.insecure_channel(target, options=options) as channel:
        if ready:
            grpc.channel_ready_future(channel).result(WAIT_SECS)
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def infer_request(model: str, request_id: str = "", **inputs: Any) -> Any:
    """A request whose inputs have one element each: text is BYTES, a number INT32."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in inputs.items():
        is_text = isinstance(value, str)
        tensor = request.inputs.add(name=name, datatype="BYTES" if is_text else "INT32", shape=[1])
        if is_text:
            tensor.contents.bytes_contents.append(value.encode())
        else:
            tensor.contents.int_contents.append(value)
    return request
