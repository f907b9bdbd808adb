"""How the bytes of an RPC reach its method, and how what the method raises reaches the client."""

import asyncio
import logging
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
)
from dataclasses import dataclass
from typing import Any, Self

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from gateway.errors import UNEXPECTED, InferenceError
from gateway.frontends.grpc.rpc import ClientDisconnected, RpcCall, RpcError, StatusCode, rpc_error
from gateway.threads import LARGE_BYTES

log = logging.getLogger("sluice.grpc")

UNPARSABLE = "Unable to parse request"
"""Triton's text, with INTERNAL."""


class _Telling:
    """Around one RPC in a frontend: what goes wrong becomes what the client learns of it.

    That is nothing of a defect of ours, which is logged. A client that is gone learns nothing.
    A CancelledError is a defect too, unless the RPC's task is cancelled: the client still waits.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, InferenceError):
            raise rpc_error(error) from None
        if isinstance(error, PASSED):
            return
        if isinstance(error, Exception) or _is_stray(error):
            log.error("request failed unexpectedly", exc_info=error)
            raise rpc_error(UNEXPECTED) from None


def _is_stray(error: BaseException | None) -> bool:
    """Whether a CancelledError comes from something else than a cancellation of this task."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is None or not task.cancelling()


TELLING = _Telling()
PASSED = (RpcError, ClientDisconnected)

Serve = Callable[[Any, RpcCall], Awaitable[Any]]
Parse = Callable[[bytes], Any]
ParseLarge = Callable[[bytes, RpcCall], Awaitable[Any]]
Serialize = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Method:
    """What stands behind one path.

    `serve` takes a message and the call, or an iterator of messages if the client streams; it
    returns a message, or sends the messages itself and returns None if the server streams. It may
    raise InferenceError or RpcError. The iterator also ends, as if the client had half-closed, when
    the client leaves; right after that the task is cancelled. `compresses` says that its answers
    are compressed where the settings ask for that. `parse_large`, if there is one, parses messages
    of more than LARGE_BYTES without blocking the event loop. One that begins `at_once` may not ask
    for the current task before its first wait (see `hyper_connection.py`).
    """

    serve: Serve
    parse: Parse
    serialize: Serialize
    client_streams: bool = False
    server_streams: bool = False
    compresses: bool = False
    at_once: bool = False
    parse_large: ParseLarge | None = None

    async def answer(self, message: bytes, call: RpcCall) -> bytes:
        """The message that a message is answered with; RpcError, and nothing else, if none is."""
        with TELLING:
            if len(message) <= LARGE_BYTES or self.parse_large is None:
                asked = self.parsed(message)
            else:
                asked = await self.parsed_large(self.parse_large(message, call))
            return self.serialize(await self.serve(asked, call))

    async def run(self, messages: AsyncIterable[bytes], call: RpcCall) -> None:
        """Send all that messages are answered with; RpcError, and nothing else, if that fails."""
        with TELLING:
            asked: Any = ParsedMessages(self, messages, call)
            if not self.client_streams:
                asked = await self._only(asked)
            answer = await self.serve(asked, call)
            if not self.server_streams:
                await call.send([self.serialize(answer)])

    async def _only(self, asked: AsyncIterable[Any]) -> Any:
        async for message in asked:
            return message
        raise RpcError(StatusCode.UNIMPLEMENTED, "the client sent no message, expected one")

    def parsed(self, message: bytes) -> Any:
        """The message; RpcError INTERNAL if it is none."""
        try:
            return self.parse(message)
        except DecodeError:
            raise RpcError(StatusCode.INTERNAL, UNPARSABLE) from None

    async def parsed_large(self, parsing: Awaitable[Any]) -> Any:
        """The same of a large message, which is being parsed."""
        try:
            return await parsing
        except DecodeError:
            raise RpcError(StatusCode.INTERNAL, UNPARSABLE) from None

    @property
    def unary(self) -> bool:
        """One message is answered with one message."""
        return not (self.client_streams or self.server_streams)


class ParsedMessages:
    """The messages of a client, parsed one after the other.

    `is_parsing` while a large one, which has been received, is parsed in a thread.
    """

    __slots__ = ("_call", "_iterator", "_messages", "_method", "is_parsing")

    def __init__(self, method: Method, messages: AsyncIterable[bytes], call: RpcCall) -> None:
        self.is_parsing = False
        self._method = method
        self._messages = messages
        self._call = call
        self._iterator: AsyncIterator[bytes] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:
            # Not sooner: a transport's iterator that is never read would be reported as a mistake.
            self._iterator = aiter(self._messages)
        message = await anext(self._iterator)
        parse_large = self._method.parse_large
        if len(message) <= LARGE_BYTES or parse_large is None:
            return self._method.parsed(message)
        self.is_parsing = True
        try:
            return await self._method.parsed_large(parse_large(message, self._call))
        finally:
            self.is_parsing = False


def methods(
    service: Any,
    servicer: object,
    in_bytes: Mapping[str, Parse] | None = None,
    compressing: Collection[str] = (),
    at_once: Collection[str] = (),
    large: Callable[[str, Parse], ParseLarge] | None = None,
) -> Iterator[tuple[str, Method]]:
    """Each path of a service, by its descriptor, and the servicer's method of that name.

    The methods in `in_bytes` take what the function there makes of the bytes, and give bytes. The
    answers of those that are `compressing` may be compressed; those `at_once` begin so. `large`
    gives the method of a name and parser what parses its large messages.
    """
    parsers = in_bytes or {}
    for described in service.methods:
        name = described.name
        parse = parsers.get(name) or GetMessageClass(described.input_type).FromString
        yield (
            f"/{service.full_name}/{name}",
            Method(
                serve=getattr(servicer, name),
                parse=parse,
                serialize=bytes if name in parsers else _serializer(described),
                client_streams=described.client_streaming,
                server_streams=described.server_streaming,
                compresses=name in compressing,
                at_once=name in at_once,
                parse_large=None if large is None else large(name, parse),
            ),
        )


def _serializer(described: Any) -> Serialize:
    serialize: Serialize = GetMessageClass(described.output_type).SerializeToString
    return serialize
