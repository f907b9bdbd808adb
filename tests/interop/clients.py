"""grpcio's two clients behind one face: a channel, its RPCs, and how an RPC ended."""

import asyncio
import queue
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from tests.interop.messages import PACKAGE, SERVICE

KINDS = ("sync", "aio")
DEADLINE_SECS = 30.0
"""Of every RPC that asks for none: no case may wait longer."""

Options = list[tuple[str, Any]]
OPTIONS: Options = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of an RPC, and the metadata on both sides of its messages."""

    code: str
    details: str
    initial: dict[str, Any]
    trailing: dict[str, Any]


class Rpc(ABC):
    """One RPC, message by message."""

    @abstractmethod
    async def ask(self, *requests: Any) -> None:
        """Send requests; those that an RPC which is over does not take are dropped."""

    @abstractmethod
    async def half_close(self) -> None:
        """Say that no request will follow."""

    @abstractmethod
    async def answer(self) -> Any:
        """The next response; None if the RPC is over."""

    @abstractmethod
    def cancel(self) -> None:
        """Leave."""

    @abstractmethod
    async def outcome(self) -> Outcome:
        """Wait for the end."""

    async def rest(self) -> Sequence[Any]:
        """Half-close, and read to the end."""
        await self.half_close()
        found = []
        while (response := await self.answer()) is not None:
            found.append(response)
        return found


class Client(ABC):
    """One channel to a target."""

    channel: Any
    kind: str

    def call(self, method: str, **options: Any) -> Any:
        """Begin an RPC without messages."""
        options.setdefault("timeout", DEADLINE_SECS)
        return self._begin(self._method(method), options)

    async def answers(self, method: str, *requests: Any, **options: Any) -> tuple[Any, Outcome]:
        """All responses to requests, and how the RPC ended."""
        rpc = self.call(method, **options)
        await rpc.ask(*requests)
        found = await rpc.rest()
        return found, await rpc.outcome()

    async def only(self, method: str, *requests: Any, **options: Any) -> Any:
        """The only response to requests; an RPC that does not end well fails the test."""
        (response,), outcome = await self.answers(method, *requests, **options)
        assert outcome.code == "OK", outcome
        return response

    @abstractmethod
    def _begin(self, method: Any, options: dict[str, Any]) -> Rpc: ...

    @abstractmethod
    async def close(self) -> None:
        """Leave the server."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _method(self, name: str) -> Any:
        """The callable of the channel for a method of the service, or for an unknown one."""
        described = SERVICE.methods_by_name.get(name)
        path = name if name.startswith("/") else f"/{PACKAGE}.TestService/{name}"
        if described is None:
            return self.channel.unary_unary(path, _serialized, bytes), "unary_unary"
        sides = (described.client_streaming, described.server_streaming)
        kind = "_".join("stream" if side else "unary" for side in sides)
        parse = GetMessageClass(described.output_type).FromString
        return getattr(self.channel, kind)(path, _serialized, parse), kind


def _serialized(request: Any) -> bytes:
    data: bytes = request.SerializeToString()
    return data


class AioClient(Client):
    """grpc.aio's."""

    kind = "aio"

    def __init__(self, target: str, options: Options, **more: Any) -> None:
        self.channel = grpc.aio.insecure_channel(target, OPTIONS + options, **more)

    def _begin(self, method: Any, options: dict[str, Any]) -> Rpc:
        return AioRpc(*method, options)

    async def close(self) -> None:
        await self.channel.close()


class AioRpc(Rpc):
    """An RPC of grpc.aio's; what takes one request begins with it."""

    def __init__(self, start: Callable[..., Any], kind: str, options: dict[str, Any]) -> None:
        self._start = lambda *request: start(*request, **options)
        self._asks, self._answers = (side == "stream" for side in kind.split("_"))
        self._rpc: Any = self._start() if self._asks else None
        self._answered = False

    async def ask(self, *requests: Any) -> None:
        if not self._asks:
            (request,) = requests
            self._rpc = self._start(request)
            return
        for request in requests:
            await self._unless_over(self._rpc.write(request))

    async def half_close(self) -> None:
        if self._asks:
            await self._unless_over(self._rpc.done_writing())

    async def answer(self) -> Any:
        if self._answers:
            response = await self._unless_over(self._rpc.read())
            return None if response is grpc.aio.EOF else response
        if self._answered:
            return None
        self._answered = True
        return await self._unless_over(self._rpc)

    def cancel(self) -> None:
        self._rpc.cancel()

    async def outcome(self) -> Outcome:
        return Outcome(
            code=(await self._rpc.code()).name,
            details=await self._rpc.details(),
            initial=dict(await self._rpc.initial_metadata() or ()),
            trailing=dict(await self._rpc.trailing_metadata() or ()),
        )

    async def _unless_over(self, step: Awaitable[Any]) -> Any:
        try:
            return await step
        except (grpc.RpcError, asyncio.InvalidStateError):
            return None
        except asyncio.CancelledError:
            # It is raised for an RPC that the client cancelled, as well as for the test's own end.
            if not self._rpc.cancelled():
                raise
            return None


class SyncClient(Client):
    """The blocking one; it blocks threads of its own."""

    kind = "sync"

    def __init__(self, target: str, options: Options, **more: Any) -> None:
        self.channel = grpc.insecure_channel(target, OPTIONS + options, **more)

    def _begin(self, method: Any, options: dict[str, Any]) -> Rpc:
        return SyncRpc(*method, options)

    async def close(self) -> None:
        self.channel.close()


class SyncRpc(Rpc):
    """An RPC of grpcio's blocking client."""

    def __init__(self, start: Any, kind: str, options: dict[str, Any]) -> None:
        self._asks, self._answers = (side == "stream" for side in kind.split("_"))
        self._requests: queue.Queue[Any] = queue.Queue()
        begin = start if self._answers else start.future
        self._begin = lambda request: begin(request, **options)
        self._rpc: Any = self._begin(iter(self._requests.get, None)) if self._asks else None
        self._answered = False

    async def ask(self, *requests: Any) -> None:
        if not self._asks:
            (request,) = requests
            self._rpc = self._begin(request)
            return
        for request in requests:
            self._requests.put(request)

    async def half_close(self) -> None:
        self._requests.put(None)

    async def answer(self) -> Any:
        return await asyncio.to_thread(self._answer)

    def _answer(self) -> Any:
        try:
            if self._answers:
                return next(self._rpc, None)
            if self._answered:
                return None
            self._answered = True
            return self._rpc.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            return None

    def cancel(self) -> None:
        self._rpc.cancel()
        self._requests.put(None)

    async def outcome(self) -> Outcome:
        return await asyncio.to_thread(self._outcome)

    def _outcome(self) -> Outcome:
        return Outcome(
            code=self._rpc.code().name,
            details=self._rpc.details(),
            initial=dict(self._rpc.initial_metadata() or ()),
            trailing=dict(self._rpc.trailing_metadata() or ()),
        )


CLIENTS: dict[str, type[Client]] = {"sync": SyncClient, "aio": AioClient}


def connect(kind: str, target: str, *options: tuple[str, Any], **more: Any) -> Client:
    """A client of a kind, on connections of its own."""
    return CLIENTS[kind](target, list(options), **more)  # type: ignore[call-arg]
