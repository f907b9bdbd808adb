"""Names by which requests in flight are cancelled."""

from typing import NamedTuple, Protocol


class RequestName(NamedTuple):
    """The name under which a request can be cancelled; the version "" matches every version."""

    model: str
    version: str
    id: str
    tenant: str = ""

    def means(self, other: "RequestName") -> bool:
        """Whether this name matches that request."""
        same = (self.model, self.id, self.tenant) == (other.model, other.id, other.tenant)
        return same and self.version in ("", other.version)


class Interruptible(Protocol):
    """The responses to a request that may be cancelled."""

    def interrupt(self) -> bool:
        """See `ResponseStream.interrupt`."""
