"""One RPC as a method sees it, whatever transport carries it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum

from gateway.errors import Code, InferenceError

Metadata = Sequence[tuple[str, str | bytes]]
"""Names in lower case; values are text, or bytes where the name ends in `-bin`."""


class StatusCode(IntEnum):
    """How an RPC ended; the numbers are those of `grpc-status` (gRPC, status codes)."""

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
    """Ends an RPC with a status other than OK, and a text for the client."""

    def __init__(self, status: StatusCode, details: str = "") -> None:
        super().__init__(details)
        self.status = status
        self.details = details


class ClientDisconnected(Exception):
    """Nobody takes what an RPC sends any more; its method is about to be cancelled."""


class RpcCall(ABC):
    """What a method knows of its RPC besides the messages.

    When the client leaves, or its deadline has passed, the method's task is cancelled.
    """

    @property
    @abstractmethod
    def metadata(self) -> Metadata:
        """What the client sent before its messages, without what belongs to gRPC itself."""

    @property
    @abstractmethod
    def peer(self) -> str:
        """Who calls, as gRPC writes addresses: `ipv4:127.0.0.1:40000`."""

    @abstractmethod
    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it set none."""

    @abstractmethod
    async def send(self, messages: Sequence[bytes]) -> None:
        """Send messages of a streamed answer, in order; returns when there is room for more.

        ClientDisconnected if there is nobody to take them.
        """

    @abstractmethod
    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Send what comes before every message, at once; at most one time, and before them."""

    @abstractmethod
    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Keep what comes after every message, beside the status."""

    @abstractmethod
    def on_end(self, ended: Callable[[], None]) -> None:
        """Have a function called when the RPC is over: its answer is sent, or nobody wants it."""


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
"""The v2 protocol's status for each code; every code has one."""

MAX_PLAIN_CHARS = 6144
MAX_CHARS = 512
"""Clients may refuse trailers beyond 8 KiB, and what is not printable ASCII is percent-encoded: up
to twelve bytes for one character."""


def rpc_error(error: InferenceError) -> RpcError:
    """Ends an RPC as an error says; a message longer than trailers can be is cut."""
    plain = error.message.isascii() and error.message.isprintable()
    limit = MAX_PLAIN_CHARS if plain else MAX_CHARS
    return RpcError(STATUS[error.code], error.message[:limit])


class Transport(ABC):
    """Serves methods at one address.

    Built inside the running event loop; raises OSError when the address cannot be had, or its TLS
    cannot be served.
    """

    port: int
    """0 for a Unix socket."""

    @abstractmethod
    async def start(self) -> None:
        """Begin to accept."""

    @abstractmethod
    async def stop(self) -> None:
        """Take no more RPCs; returns once those under way have ended."""

    @abstractmethod
    async def cut_off(self, grace_secs: float) -> None:
        """Drop what is still under way when the grace period is over; comes after `stop`."""
