"""One RPC as a method sees it, whatever transport carries it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum

Metadata = Sequence[tuple[str, str | bytes]]
"""Names in lower case; values are text, or bytes where the name ends in `-bin`."""


class Status(IntEnum):
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

    def __init__(self, status: Status, details: str = "") -> None:
        super().__init__(details)
        self.status = status
        self.details = details


class ClientGone(Exception):
    """Nobody takes what an RPC sends any more; its method is about to be cancelled."""


class Call(ABC):
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

        ClientGone if there is nobody to take them.
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
