"""The service of single requests in a fair queue."""

from collections.abc import Sequence
from typing import Protocol

from gateway.messages import Phases, Usage
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

    def look(self) -> None:
        """Release requests that wait, if a place is free."""

    def notice_changes(self) -> None:
        """Have the weights that rules have now, if rules have changed."""


class Service:
    """The service of one request. Implements `TokenReader`.

    `label` is the one of its tenant in metrics, `rows` are those of the request. It has `places` of
    the window from its release on, while it `is_released`. `size_bytes` is the size of its texts,
    `estimate` its expected cost, until the real one is known. `outputs` are its tokens that are
    charged; it `has_tokens` once any were counted. Its record and the end of its stream call it, so
    that no event of the stream passes through it; it has its `record` and its owner until then:
    they are no cycle, and a receipt that is kept holds no scheduler.
    """

    __slots__ = (
        "_owner",
        "_reader",
        "estimate",
        "has_tokens",
        "is_released",
        "label",
        "outputs",
        "places",
        "record",
        "rows",
        "size_bytes",
        "tenant",
    )
    noted = ()

    def __init__(
        self, owner: PlaceOwner, reader: ServiceReader, record: Record, tenant: str, label: str
    ) -> None:
        self._owner: PlaceOwner | None = owner
        self._reader = reader
        self.record: Record | None = record
        self.tenant, self.label = tenant, label
        self.rows = record.batch_size or 1
        self.places = 1
        self.has_tokens = self.is_released = False
        self.estimate = 0.0
        self.size_bytes = self.outputs = 0

    # Events of its execution.

    def freed(self, record: Record | None = None) -> None:
        """Its instance takes another request before this one ends."""
        if self._owner is not None:
            self._owner.freed(self)

    def executed(self, record: Record, phases: Phases, rows: int) -> None:
        """An execution with that many rows has ended."""
        if not self.has_tokens:
            self._reader.computed(self, part_ms(phases, self.rows, rows))

    def ended(self) -> None:
        """Its stream has ended: its share of the model is free."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.ended(self)
        self.record = None

    # TokenReader.

    def counted(self, record: Record, usage: Usage | None) -> None:
        """See `TokenReader`; each token is charged once."""
        if usage is not None:
            self.has_tokens = True
            if usage.prompt_tokens:
                self._reader.prompted(self, usage)
        made = 0 if self.record is None else self.record.completion_tokens - self.outputs
        if made:
            self.has_tokens = True
            self.outputs += made
            self._reader.made(self, OUTPUT, made)

    def wasted(self, usage: Usage) -> None:
        """See `TokenReader`: they took their time."""
        self._reader.made(self, WASTED, usage.completion_tokens)


def part_ms(phases: Phases, own: int, rows: int) -> float:
    """The milliseconds of a request with its own rows in an execution of all rows."""
    spent_ns = phases.input_ns + phases.infer_ns + phases.output_ns
    return spent_ns / NS_PER_MS * own / (rows if rows > own else own)


def charge_each(records: Sequence[Record], spent: Phases, rows: int) -> None:
    """Have the readers of an execution's records charge each that has no `execution` yet.

    It is charged at its end if nothing but ends of these records is noted from there on, else now:
    what has begun in between comes first.
    """
    nth = 1
    for record in reversed(records):
        if (reader := record.reader) is None or record.execution is not None:
            continue
        noted = reader.noted
        if len(noted) >= nth and noted[-nth] is record and record.ended_ns:
            record.execution, nth = (spent, rows), nth + 1
        else:
            reader.executed(record, spent, rows)
