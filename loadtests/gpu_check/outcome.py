"""What a part of the check found: rows of figures, and whether they are as they should be."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from loadtests.results import Better


class Status(StrEnum):
    """How a part ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Skipped(Exception):
    """A part cannot be checked on this machine; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure, by the gateway and, where there is such a thing, by the runtime alone.

    A row without a promise is `ok` whatever its figure is; `expected` is the promise in words.
    """

    name: str
    gateway: float
    alone: float | None = None
    better: Better = Better.NEITHER
    ok: bool = True
    expected: str = ""

    @property
    def ratio(self) -> float | None:
        """The gateway's figure over the runtime's."""
        return self.gateway / self.alone if self.alone else None

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "better": self.better.value, "ratio": self.ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a part ended; `reason` says why it was skipped or failed."""

    part: str
    status: Status
    reason: str = ""
    secs: float = 0.0
    rows: Sequence[Row] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "rows": [row.as_json() for row in self.rows]}


def judged(part: str, rows: Sequence[Row], secs: float) -> Outcome:
    """A part that went through: it has passed if every row is as it should be."""
    bad = [
        f"{row.name}: found {row.gateway:g}, expected {row.expected}" for row in rows if not row.ok
    ]
    status = Status.FAILED if bad else Status.PASSED
    return Outcome(part=part, status=status, reason="; ".join(bad), secs=secs, rows=rows)


def read_outcome(told: Mapping[str, Any]) -> Outcome:
    """The outcome that a part's process wrote down."""
    rows = [
        Row(**{**row, "better": Better(row["better"])})
        for row in ({k: v for k, v in each.items() if k != "ratio"} for each in told["rows"])
    ]
    return Outcome(**{**told, "status": Status(told["status"]), "rows": rows})
