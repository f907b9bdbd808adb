"""What the check found, as one table."""

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from loadtests.gpu_check.outcome import Outcome, Row, Status
from loadtests.results import Better

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
    """What is neither good nor bad, and promised by nobody, stands in the file only."""
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
