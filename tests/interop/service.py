"""gRPC's own test service, as methods of a transport (grpc/testing/test.proto)."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from gateway.frontends.grpc.rpc import RpcCall
from gateway.frontends.grpc.status import RpcError, StatusCode
from tests.interop.messages import (
    Empty,
    SimpleResponse,
    StreamingInputCallResponse,
    StreamingOutputCallResponse,
)

ECHO_INITIAL = "x-grpc-test-echo-initial"
ECHO_TRAILING = "x-grpc-test-echo-trailing-bin"
HOLD = "x-test-hold"
"""A client that sends this has its messages read only once `reading` is set."""


class InteropServicer:
    """Does what requests ask for.

    `begun`, `sent` and `ended` tell by method which RPCs came, what they sent and how they ended.
    """

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.sent: Counter[str] = Counter()
        self.ended: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.reading = asyncio.Event()

    async def EmptyCall(self, request: Any, call: RpcCall) -> Any:
        with self._noted("EmptyCall"):
            return Empty()

    async def UnaryCall(self, request: Any, call: RpcCall) -> Any:
        with self._noted("UnaryCall"):
            await _echo_metadata(call)
            _require_ok(request.response_status)
            return SimpleResponse(payload={"body": bytes(request.response_size)})

    async def StreamingOutputCall(self, request: Any, call: RpcCall) -> None:
        with self._noted("StreamingOutputCall"):
            await self._send(request, call, "StreamingOutputCall")

    async def StreamingInputCall(self, requests: AsyncIterator[Any], call: RpcCall) -> Any:
        with self._noted("StreamingInputCall"):
            if HOLD in dict(call.metadata):
                await self.reading.wait()
            size = 0
            async for request in requests:
                size += len(request.payload.body)
            return StreamingInputCallResponse(aggregated_payload_size=size)

    async def FullDuplexCall(self, requests: AsyncIterator[Any], call: RpcCall) -> None:
        with self._noted("FullDuplexCall"):
            await _echo_metadata(call)
            async for request in requests:
                _require_ok(request.response_status)
                await self._send(request, call, "FullDuplexCall")

    async def HalfDuplexCall(self, requests: AsyncIterator[Any], call: RpcCall) -> None:
        with self._noted("HalfDuplexCall"):
            for request in [each async for each in requests]:
                await self._send(request, call, "HalfDuplexCall")

    async def _send(self, request: Any, call: RpcCall, method: str) -> None:
        for parameters in request.response_parameters:
            if parameters.interval_us:
                await asyncio.sleep(parameters.interval_us / 1e6)
            response = StreamingOutputCallResponse(payload={"body": bytes(parameters.size)})
            await call.send([response.SerializeToString()])
            self.sent[method] += 1

    @contextmanager
    def _noted(self, method: str) -> Iterator[None]:
        self.begun.put_nowait(method)
        how = "answered"
        try:
            yield
        except RpcError:
            how = "refused"
            raise
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            self.ended.put_nowait((method, how))


async def _echo_metadata(call: RpcCall) -> None:
    """Send back what a client wants to see again, before and after the messages."""
    found = dict(call.metadata)
    if ECHO_INITIAL in found:
        await call.send_initial_metadata([(ECHO_INITIAL, found[ECHO_INITIAL])])
    if ECHO_TRAILING in found:
        call.set_trailing_metadata([(ECHO_TRAILING, found[ECHO_TRAILING])])


def _require_ok(wanted: Any) -> None:
    if wanted.code:
        raise RpcError(StatusCode(wanted.code), wanted.message)
