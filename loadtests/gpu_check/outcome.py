"""Outcomes of parts: rows of figures, their verdict, and their table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rich.markup import escape
from rich.table import Table

from loadtests.support.rounds import Better


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

    A row without a promise is `ok` with any figure; `expected` is the promise in words.
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
    """The outcome of a part that ended: passed if every row is right."""
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


COLOURS = {Status.PASSED: "green", Status.FAILED: "bold red", Status.SKIPPED: "yellow"}


def table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """A line for each part, and below it one for each figure."""
    made = Table(title=title, title_justify="left")
    made.add_column("part", overflow="fold")
    for heading in ("alone", "gateway", "ratio"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("result", overflow="fold")
    for outcome in outcomes:
        status = f"[{COLOURS[outcome.status]}]{outcome.status}[/], {outcome.secs:.0f} s"
        first, _, more = outcome.reason.partition("\n")
        reason = f": {escape(first)}{' ... (the rest is in the file)' if more else ''}"
        reason = reason if first else ""
        made.add_row(f"[bold]{outcome.part}[/]", "", "", "", f"{status}{reason}")
        for row in filter(_is_telling, outcome.rows):
            made.add_row(f"  {escape(row.name)}", *_cells(row))
        made.add_section()
    return made


def _is_telling(row: Row) -> bool:
    """Whether a row is shown; one without a verdict is in the file only."""
    return row.expected != "" or row.better is not Better.NEITHER


def _cells(row: Row) -> Iterator[str]:
    yield "" if row.alone is None else _number(row.alone)
    yield _number(row.gateway)
    yield _ratio(row)
    if row.expected:
        yield f"{'[green]ok[/]' if row.ok else '[bold red]wrong[/]'}: expected {row.expected}"
    else:
        yield ""


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return ""
    if row.better is Better.NEITHER:
        return f"{row.ratio:.2f}"
    good = row.ratio >= 1 if row.better is Better.HIGHER else row.ratio <= 1
    return f"[{'green' if good else 'red'}]{row.ratio:.2f}[/]"


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
