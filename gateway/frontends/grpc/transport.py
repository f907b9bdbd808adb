"""What carries RPCs: a bound address, and the life of a server behind it."""

from abc import ABC, abstractmethod


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
