"""RPCs as the logs note them."""

import asyncio
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.access import end_answered, end_refused, logged
from gateway.frontends.grpc.rpc import ClientDisconnected, Method, RpcCall
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.observability.access_log import AccessLog
from gateway.observability.request_context import LoggedRequest, current_request
from gateway.policy.caller import Caller

PATH = "/inference.GRPCInferenceService/ModelInfer"


class Notes(AccessLog):
    """An access log that keeps what has ended."""

    def __init__(self) -> None:
        super().__init__(None)
        self.found: list[LoggedRequest] = []

    def ended(self, request: LoggedRequest) -> None:
        self.found.append(request)


class Call(RpcCall):
    """An RPC of a client with that time left."""

    metadata = ()
    peer = "ipv4:10.0.0.1:4000"

    def __init__(self, secs: float | None = None) -> None:
        super().__init__()
        self.secs = secs

    def time_remaining(self) -> float | None:
        return self.secs

    async def send(self, messages: Any) -> None:
        """Nothing is sent."""

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Nothing is sent."""

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Nothing is sent."""

    def on_end(self, ended: Any) -> None:
        """It does not end."""


def method(error: BaseException | None, notes: Notes, **fields: Any) -> Method:
    async def serve(message: bytes, call: RpcCall) -> bytes:
        call.caller = Caller(tenant="team")
        if error is not None:
            raise error
        assert current_request() is not None
        return b"answer"

    found = Method(serve, bytes, bytes, **fields)
    return logged({PATH: found}, notes)[PATH]


@pytest.mark.parametrize(
    ("error", "secs", "status"),
    [
        (None, None, "OK"),
        (RpcError(StatusCode.ABORTED), None, "ABORTED"),
        (InferenceError(Code.UNSUPPORTED, "no"), None, "UNIMPLEMENTED"),
        (ClientDisconnected(), 5.0, "CANCELLED"),
        (ClientDisconnected(), 0.0, "DEADLINE_EXCEEDED"),
    ],
)
async def test_a_unary_rpc_has_its_status(
    error: BaseException | None, secs: float | None, status: str
) -> None:
    notes = Notes()
    try:
        await method(error, notes).answer(b"question", Call(secs))
    except (RpcError, ClientDisconnected):
        assert error is not None
    (found,) = notes.found
    assert (found.status, found.bytes_in, found.peer) == (status, 8, "10.0.0.1")
    assert found.code == ("UNSUPPORTED" if isinstance(error, InferenceError) else "")
    assert found.names() == {"tenant": "team"}
    assert found.bytes_out == (0 if error else 6)


async def test_a_cancelled_rpc_has_a_line() -> None:
    notes = Notes()
    begun = asyncio.Event()

    async def wait(message: bytes, call: RpcCall) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return b""

    found = logged({PATH: Method(wait, bytes, bytes)}, notes)[PATH]
    task = asyncio.create_task(found.answer(b"", Call()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [each.status for each in notes.found] == ["CANCELLED"]


def test_a_refusal_before_the_message_is_read_has_a_line() -> None:
    def guard(rpc: Any) -> None:
        raise RpcError(StatusCode.UNAUTHENTICATED)

    notes = Notes()
    found = method(None, notes, guard=guard).guard
    assert found is not None
    with pytest.raises(RpcError):
        found(Call())
    assert [each.members()["reason"] for each in notes.found] == ["unauthenticated"]


async def test_a_refusal_within_an_rpc_has_one_line() -> None:
    def guard(rpc: Any) -> None:
        raise RpcError(StatusCode.PERMISSION_DENIED)

    notes = Notes()
    with pytest.raises(RpcError):
        await method(None, notes, guard=guard).answer(b"", Call())
    assert [each.members()["reason"] for each in notes.found] == ["forbidden"]


def test_lines_of_an_rpc_without_a_task_are_about_it() -> None:
    notes = Notes()
    noted: list[str] = []

    class Beginning:
        def may_begin(self, size_bytes: int) -> bool:
            return True

        def begin(self, message: Any, call: Any) -> None:
            request = current_request()
            noted.append("" if request is None else request.route)

    found = method(None, notes)
    found.begin(Beginning(), b"", Call())  # type: ignore[arg-type]
    assert noted == [PATH]
    assert current_request() is None
    assert notes.found == []


async def test_a_request_of_a_stream_has_the_status_of_its_error() -> None:
    notes = Notes()
    rpc = notes.request("grpc", PATH, "", "", [])

    async def answer(*, failing: bool) -> None:
        if failing:
            raise RpcError(StatusCode.ABORTED)

    answered, failed, cancelled = (
        asyncio.create_task(answer(failing=failing)) for failing in (False, True, False)
    )
    cancelled.cancel()  # before it has begun
    await asyncio.wait([answered, failed, cancelled])
    end_answered(rpc.part("a", None), answered)
    end_answered(rpc.part("b", None), failed)
    end_answered(rpc.part("c", None), cancelled)
    end_refused(rpc.part("d", None), InferenceError(Code.UNAVAILABLE, "no"))
    found = [(each.id, each.status) for each in notes.found]
    statuses = {"a": "OK", "b": "CANCELLED", "c": "CANCELLED", "d": "UNAVAILABLE"}
    assert found == list(statuses.items())
