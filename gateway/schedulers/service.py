"""The service of single requests in a fair queue."""

from collections.abc import Sequence
from typing import Protocol

from gateway.errors import InferenceError
from gateway.messages import InferResponse, Phases, StreamRecorder, Usage
from gateway.observability.request_record import Record

NS_PER_MS = 1e6
OUTPUT, WASTED = "output", "wasted"
"""Kinds of service: tokens with a reader, and those without."""


class ServiceReader(Protocol):
    """Gets what requests cost."""

    def prompted(self, service: "Service", usage: Usage) -> None:
        """The engine has counted the tokens of the prompt."""

    def made(self, service: "Service", kind: str, tokens: int) -> None:
        """The engine has made tokens: OUTPUT, or WASTED ones."""

    def computed(self, service: "Service", ms: float) -> None:
        """An execution of a request without tokens has ended, of which it had that part."""


class PlaceOwner(Protocol):
    """Gets the ends of requests that have places."""

    def freed(self, service: "Service") -> None:
        """Its instance takes another request before this one ends."""

    def ended(self, service: "Service") -> None:
        """The request has ended."""


class Service:
    """The service of one request; a `StreamRecorder` that passes every event on to `account`.

    `label` is the one of its tenant in metrics, `rows` are those of the request. It has `places` of
    the window from its release on. `size_bytes` is the size of its texts, `estimate` its expected
    cost, until the real one is known. `outputs` are its tokens that are charged; it `has_tokens`
    once any were counted.
    """

    __slots__ = (
        "_owner",
        "_reader",
        "account",
        "estimate",
        "has_tokens",
        "label",
        "outputs",
        "places",
        "record",
        "rows",
        "size_bytes",
        "tenant",
    )

    def __init__(
        self, owner: PlaceOwner, reader: ServiceReader, record: Record, tenant: str, label: str
    ) -> None:
        self._owner, self._reader = owner, reader
        self.account: StreamRecorder = record
        self.record = record
        self.tenant, self.label = tenant, label
        self.rows = record.batch_size or 1
        self.places = 1
        self.has_tokens = False
        self.estimate = 0.0
        self.size_bytes = self.outputs = 0

    # Events of its execution.

    def freed(self) -> None:
        """Its instance takes another request before this one ends."""
        self._owner.freed(self)

    def executed(self, phases: Phases, rows: int) -> None:
        """An execution with that many rows has ended."""
        if not self.has_tokens:
            spent_ns = phases.input_ns + phases.infer_ns + phases.output_ns
            self._reader.computed(self, spent_ns / NS_PER_MS * self.rows / max(rows, self.rows))

    # StreamRecorder.

    def responded(self, response: InferResponse) -> None:
        """Count the tokens of a response."""
        self.account.responded(response)
        usage = response.usage
        if usage is not None:
            self.has_tokens = True
            if usage.prompt_tokens:
                self._reader.prompted(self, usage)
            self._charge()

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """As `responded`, for texts that are already written."""
        self.account.delivered(name, texts, tokens)
        self._charge()

    def taken(self) -> None:
        """Pass the event on."""
        self.account.taken()

    def wasted(self, response: InferResponse) -> None:
        """Count tokens without a reader: they took their time."""
        self.account.wasted(response)
        if response.usage is not None:
            self._reader.made(self, WASTED, response.usage.completion_tokens)

    def ended(self, error: InferenceError | None) -> None:
        """Its share of the model is free."""
        self.account.ended(error)
        self._owner.ended(self)

    def _charge(self) -> None:
        """Charge the tokens of the record since the last call."""
        made = self.record.completion_tokens - self.outputs
        if made:
            self.has_tokens = True
            self.outputs += made
            self._reader.made(self, OUTPUT, made)
