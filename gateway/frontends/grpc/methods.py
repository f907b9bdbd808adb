"""How the bytes of an RPC reach its method, and how what the method raises reaches the client."""

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
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from gateway.errors import UNEXPECTED, InferenceError
from gateway.frontends.grpc.errors import rpc_error
from gateway.frontends.grpc.rpc import Call, ClientGone, RpcError, Status

log = logging.getLogger("sluice.grpc")

UNPARSABLE = "Unable to parse request"
"""Triton's text, with INTERNAL."""


class _Telling:
    """Around one RPC in a frontend: what goes wrong becomes what the client learns of it.

    That is nothing of a defect of ours, which is logged. A client that is gone learns nothing.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, InferenceError):
            raise rpc_error(error) from None
        if isinstance(error, Exception) and not isinstance(error, PASSED):
            log.error("request failed unexpectedly", exc_info=error)
            raise rpc_error(UNEXPECTED) from None


TELLING = _Telling()
PASSED = (RpcError, ClientGone)

Serve = Callable[[Any, Call], Awaitable[Any]]
Parse = Callable[[bytes], Any]
Serialize = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True)
class Method:
    """What stands behind one path.

    `serve` takes a message and the call, or an iterator of messages if the client streams; it
    returns a message, or sends the messages itself and returns None if the server streams. It may
    raise InferenceError or RpcError. The iterator also ends, as if the client had half-closed, when
    the client leaves; right after that the task is cancelled. `compresses` says that its answers
    are compressed where the settings ask for that. One that begins `at_once` may not ask for the
    current task before it has waited for something (see `gateway/eager.py`).
    """

    serve: Serve
    parse: Parse
    serialize: Serialize
    client_streams: bool = False
    server_streams: bool = False
    compresses: bool = False
    at_once: bool = False

    async def answer(self, message: bytes, call: Call) -> bytes:
        """The message that a message is answered with; RpcError, and nothing else, if none is."""
        with TELLING:
            return self.serialize(await self.serve(self._parsed(message), call))

    async def run(self, messages: AsyncIterable[bytes], call: Call) -> None:
        """Send all that messages are answered with; RpcError, and nothing else, if that fails."""
        with TELLING:
            asked = self._asked(messages) if self.client_streams else await self._only(messages)
            answer = await self.serve(asked, call)
            if not self.server_streams:
                await call.send([self.serialize(answer)])

    async def _asked(self, messages: AsyncIterable[bytes]) -> AsyncIterator[Any]:
        async for message in messages:
            yield self._parsed(message)

    async def _only(self, messages: AsyncIterable[bytes]) -> Any:
        async for message in messages:
            return self._parsed(message)
        raise RpcError(Status.UNIMPLEMENTED, "the client sent no message, expected one")

    def _parsed(self, message: bytes) -> Any:
        try:
            return self.parse(message)
        except DecodeError:
            raise RpcError(Status.INTERNAL, UNPARSABLE) from None

    @property
    def unary(self) -> bool:
        """One message is answered with one message."""
        return not (self.client_streams or self.server_streams)


def methods(
    service: Any,
    servicer: object,
    in_bytes: Mapping[str, Parse] | None = None,
    compressing: Collection[str] = (),
    at_once: Collection[str] = (),
) -> Iterator[tuple[str, Method]]:
    """Each path of a service, by its descriptor, and the servicer's method of that name.

    The methods in `in_bytes` take what the function there makes of the bytes, and give bytes. The
    answers of those that are `compressing` may be compressed; those `at_once` begin so.
    """
    parsers = in_bytes or {}
    for described in service.methods:
        name = described.name
        yield (
            f"/{service.full_name}/{name}",
            Method(
                serve=getattr(servicer, name),
                parse=parsers.get(name) or GetMessageClass(described.input_type).FromString,
                serialize=bytes if name in parsers else _serializer(described),
                client_streams=described.client_streaming,
                server_streams=described.server_streaming,
                compresses=name in compressing,
                at_once=name in at_once,
            ),
        )


def _serializer(described: Any) -> Serialize:
    serialize: Serialize = GetMessageClass(described.output_type).SerializeToString
    return serialize
