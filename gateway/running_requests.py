"""Which requests run under which id, so that one of them can be cancelled alone?"""

from typing import NamedTuple
from weakref import ref

from gateway.stream import ResponseStream


class RequestName(NamedTuple):
    """What a request is known by; the version "" stands for any."""

    model: str
    version: str
    id: str

    def means(self, other: "RequestName") -> bool:
        """Whether a request of that name is meant."""
        return (self.model, self.id) == (other.model, other.id) and self.version in (
            "",
            other.version,
        )


class RunningRequests:
    """The streams of requests that have an id, as long as anybody holds them.

    Ids are the clients' own, so several requests may have the same. To add one costs an entry in a
    table, which goes with the stream; to find one, a look at every entry.
    """

    def __init__(self) -> None:
        self._names: dict[ref[ResponseStream], RequestName] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: RequestName, stream: ResponseStream) -> None:
        """Remember the stream of a request that has been submitted."""
        self._names[ref(stream, self._names.pop)] = name

    def streams(self, name: RequestName) -> list[ResponseStream]:
        """The streams of that name; some may be over already."""
        # A copy, because entries go whenever the garbage collector runs.
        entries = self._names.copy().items()
        found = [stream() for stream, each in entries if name.means(each)]
        return [stream for stream in found if stream is not None]
