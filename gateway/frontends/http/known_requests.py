"""What the JSON of a request meant when it came before: clients repeat it while shapes stay.

Only the binary data behind it changes then, and reading the JSON again would tell nothing new.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.frontends.http.infer_inputs import Piece
from gateway.frontends.http.request_parameters import RequestParameters
from gateway.frontends.http.requested_outputs import OutputForms
from gateway.messages import RequestedOutput
from gateway.tensor import Tensor

MOST_KNOWN = 256
MOST_BYTES = 4096
"""Of one JSON; longer ones take little room in the time that their data takes."""


class KnownRequest(NamedTuple):
    """All that the JSON of a request says, which must not be changed; `size` bytes follow it."""

    size: int
    id: str
    parameters: RequestParameters
    pieces: Sequence[Piece]
    outputs: tuple[RequestedOutput, ...]
    forms: OutputForms

    def inputs(self, binary: memoryview) -> tuple[Tensor, ...]:
        """The inputs with these bytes for data, as views of them."""
        return tuple(
            [
                Tensor(name, datatype, shape, binary[start:end])
                for name, datatype, shape, start, end in self.pieces
            ]
        )


class KnownRequests:
    """The latest of those that have been decoded, by their JSON."""

    def __init__(self) -> None:
        self._known: dict[bytes, KnownRequest] = {}

    def get(self, header: bytes, size: int) -> KnownRequest | None:
        """The one with that JSON and so many bytes behind it, if it is known."""
        known = self._known.get(header) if len(header) <= MOST_BYTES else None
        return known if known is not None and known.size == size else None

    def add(self, header: bytes, known: KnownRequest) -> None:
        """Remember one that was decoded well; in place of the one known longest, if need be."""
        if len(header) > MOST_BYTES:
            return
        if len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[header] = known
