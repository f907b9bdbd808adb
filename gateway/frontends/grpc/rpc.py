"""RPCs as their methods see them: call, status codes, errors, transport."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum

from gateway.errors import Code, InferenceError

Metadata = Sequence[tuple[str, str | bytes]]
"""Pairs of a lower-case name and a value: text, or bytes if the name ends in `-bin`."""


class StatusCode(IntEnum):
    """Status codes with the numbers of `grpc-status` (gRPC, status codes)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class RpcError(Exception):
    """Ends an RPC with a status other than OK and a text for the client."""

    def __init__(self, status: StatusCode, details: str = "") -> None:
        super().__init__(details)
        self.status = status
        self.details = details


class ClientDisconnected(Exception):
    """The client has disconnected; the method is about to be cancelled."""


class RpcCall(ABC):
    """Interface between a method and the transport of its RPC.

    The task of the method is cancelled when the client disconnects or its deadline passes.
    """

    @property
    @abstractmethod
    def metadata(self) -> Metadata:
        """The initial metadata of the client, without the headers of gRPC itself."""

    @property
    @abstractmethod
    def peer(self) -> str:
        """The address of the client in gRPC's notation: `ipv4:127.0.0.1:40000`."""

    @abstractmethod
    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None without a deadline."""

    @abstractmethod
    async def send(self, messages: Sequence[bytes]) -> None:
        """Send messages of a streamed answer, in order; return when the buffer has room.

        Raises ClientDisconnected after a disconnect.
        """

    @abstractmethod
    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Send the initial metadata immediately; at most once, before any message."""

    @abstractmethod
    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Store the metadata that is sent after the messages, together with the status."""

    @abstractmethod
    def on_end(self, ended: Callable[[], None]) -> None:
        """Call a function when the RPC has ended: answered, failed or cancelled."""


STATUS = {
    Code.UNKNOWN: StatusCode.UNKNOWN,
    Code.INTERNAL: StatusCode.INTERNAL,
    Code.NOT_FOUND: StatusCode.NOT_FOUND,
    Code.INVALID_ARG: StatusCode.INVALID_ARGUMENT,
    Code.UNAVAILABLE: StatusCode.UNAVAILABLE,
    Code.UNSUPPORTED: StatusCode.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: StatusCode.ALREADY_EXISTS,
    Code.CANCELLED: StatusCode.CANCELLED,
}
"""The status of each code of an InferenceError (v2 protocol)."""

MAX_PLAIN_CHARS = 6144
MAX_CHARS = 512
"""Limits of an error text: clients may refuse trailers above 8 KiB, and percent-encoding turns one
character into up to twelve bytes."""


def rpc_error(error: InferenceError) -> RpcError:
    """The RpcError of an InferenceError; its text is cut to the limit of trailers."""
    plain = error.message.isascii() and error.message.isprintable()
    limit = MAX_PLAIN_CHARS if plain else MAX_CHARS
    return RpcError(STATUS[error.code], error.message[:limit])


class Transport(ABC):
    """Server of methods at one address.

    Needs a running event loop. Raises OSError if the address cannot be bound or the TLS files
    cannot be used.
    """

    port: int
    """0 for a Unix socket."""

    @abstractmethod
    async def start(self) -> None:
        """Start accepting connections."""

    @abstractmethod
    async def stop(self) -> None:
        """Refuse new RPCs; return when the running ones have ended."""

    @abstractmethod
    async def cut_off(self, grace_secs: float) -> None:
        """Drop the connections that remain after the grace period; call after `stop`."""
