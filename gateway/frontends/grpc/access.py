"""RPCs as the logs note them: method, status, caller and sizes."""

import asyncio
from collections.abc import AsyncIterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from google.protobuf.message import DecodeError

from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.rpc import (
    Beginning,
    BegunCall,
    ClientDisconnected,
    Guard,
    Method,
    RpcCall,
    RpcHead,
    Serve,
)
from gateway.frontends.grpc.status import STATUS, RpcError, StatusCode
from gateway.observability.access_log import AccessLog
from gateway.observability.request_context import LoggedRequest, current_request
from gateway.observability.traceparent import TRACEPARENT
from gateway.policy.areas import AREA_OF_METHOD_CHANGE, AREA_OF_SETTINGS
from gateway.policy.caller import address_of


def logged(methods: Mapping[str, Method], log: AccessLog) -> Mapping[str, Method]:
    """The methods, whose RPCs are noted for the logs."""
    return {path: _logged(path, method, log) for path, method in methods.items()}


def _logged(path: str, method: Method, log: AccessLog) -> "LoggedMethod":
    parts = {each.name: getattr(method, each.name) for each in fields(method)}
    found = LoggedMethod(**parts, path=path, log=log)
    guard = None if method.guard is None else found.guarding(method.guard)
    return replace(found, serve=_noting(method.serve), guard=guard)


def _noting(serve: Serve) -> Serve:
    """The method, whose error is noted."""

    async def noted_serve(message: Any, call: RpcCall) -> Any:
        try:
            return await serve(message, call)
        except InferenceError as error:
            if (request := current_request()) is not None:
                request.note(error)
            raise

    return noted_serve


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedMethod(Method):
    """A method whose RPCs are noted; `path` is its own."""

    path: str
    log: AccessLog

    async def answer(self, message: bytes, call: RpcCall) -> bytes:
        """See `Method`."""
        with self._noted(call) as request:
            request.bytes_in = len(message)
            request.changes = self._changes(message)
            answer = await Method.answer(self, message, call)
            request.bytes_out = len(answer)
            return answer

    def begin(self, beginning: Beginning, message: bytes, call: BegunCall) -> None:
        """See `Method`; lines of the process' log are about the RPC meanwhile."""
        with self._request(call).current():
            Method.begin(self, beginning, message, call)

    async def run(self, messages: AsyncIterable[bytes], call: RpcCall) -> None:
        """See `Method`."""
        with self._noted(call):
            await Method.run(self, messages, call)

    def guarding(self, guard: Guard) -> Guard:
        """The condition of the method; a refusal before the RPC is read has a line."""

        def noted_guard(rpc: RpcHead) -> None:
            try:
                guard(rpc)
            except RpcError as error:
                if current_request() is None:
                    with self._request(rpc) as request:
                        request.status, request.caller = error.status.name, rpc.caller
                raise

        return noted_guard

    def _changes(self, message: bytes) -> bool:
        """Whether a message changes the server; that of settings may only read them."""
        if self.path not in AREA_OF_SETTINGS:
            return self.path in AREA_OF_METHOD_CHANGE
        try:
            return bool(self.parse(message).settings)
        except DecodeError:
            return False

    @contextmanager
    def _noted(self, call: RpcCall) -> Iterator[LoggedRequest]:
        with self._request(call) as request:
            try:
                yield request
                request.status = StatusCode.OK.name
            except RpcError as error:
                request.status = error.status.name
                raise
            except (ClientDisconnected, asyncio.CancelledError):
                secs = call.time_remaining()
                is_late = secs is not None and secs <= 0
                found = StatusCode.DEADLINE_EXCEEDED if is_late else StatusCode.CANCELLED
                request.status = found.name
                raise
            finally:
                request.caller = call.caller

    def _request(self, rpc: RpcHead) -> LoggedRequest:
        parents = [str(value) for name, value in rpc.metadata if name == TRACEPARENT]
        return self.log.request("grpc", self.path, "", address_of(rpc.peer), parents)


def end_answered(request: LoggedRequest, task: asyncio.Task[None]) -> None:
    """End a request of ModelStreamInfer, whose task has ended."""
    is_whole = not task.cancelled() and task.exception() is None
    _end(request, StatusCode.OK if is_whole else StatusCode.CANCELLED)


def end_refused(request: LoggedRequest, error: InferenceError) -> None:
    """End a request of ModelStreamInfer that is refused."""
    request.note(error)
    _end(request, StatusCode.OK)


def _end(request: LoggedRequest, status: StatusCode) -> None:
    """End a request with a status, or with that of its error."""
    with request:
        request.status = (STATUS[Code[request.code]] if request.code else status).name
