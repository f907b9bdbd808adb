"""The page of figures: the claims, and a table for each load test."""

from collections.abc import Iterator, Sequence

from loadtests.figures.claims import CLAIMED, CLAIMS, GROUPS, RUNS
from loadtests.figures.stored import Figures, StoredLine, shown
from loadtests.support.results import PROCESSOR_TIME, RATE, describe

HEAD = """# Figures

`make bench TEST=all` measures the lines of this page and writes it, with [the chart](figures.svg).
The figures are in [`figures.json`](figures.json), the methods in [`README.md`](README.md).

- A figure is the median of interleaved rounds; the spread is the range of the rounds over it.
- Processor time is that of all processes of the server, in user and system mode, for one unit of
  the rate. It differs less between a quiet and a busy machine than the rate.
- A ratio is over the peer's figure, which is in the row without a ratio: the median of the rounds'
  ratios. Claims are judged by its two decimals.
- A short round shows that a line can be measured. Its figures are not reliable.

![both sides' processor time, and the bounds of the claims](figures.svg)
"""
COLUMNS = (
    "line",
    "side",
    "rate",
    "ratio",
    "processor time",
    "ratio",
    "spread",
    "more",
    "claims",
    "measured",
)


def page(figures: Figures) -> str:
    """The whole page."""
    parts = [HEAD, *_summary(figures)]
    for test in GROUPS:
        if lines := figures.of_test(test):
            parts += ["", *_table(test, lines, figures)]
    return "\n".join([*parts, "", *_machines(figures), ""])


def _summary(figures: Figures) -> Iterator[str]:
    """The number of claims by their verdict, and a line for each that does not hold."""
    verdicts = [(claim, figures.verdict(claim)) for claim in CLAIMS]
    failed = [(claim, verdict) for claim, verdict in verdicts if verdict.fails]
    missing = sum(verdict.found is None for _, verdict in verdicts)
    held = len(verdicts) - len(failed) - missing
    yield f"Claims: {held} hold, {len(failed)} do not hold, {missing} are not measured."
    if failed:
        yield from (
            "",
            "| claims that do not hold | bound | found | measured |",
            "|---|---|---|---|",
        )
    for claim, verdict in failed:
        line = figures.lines[claim.test, claim.line]
        name = f"{GROUPS[claim.test].title}: {claim.line}"
        bound = f"{claim.bound.figure} {claim.bound}"
        yield f"| {name} | {bound} | {_found(verdict.found)} | {line.measured} |"


def _found(value: float | None) -> str:
    return "" if value is None else shown(value)


def _table(test: str, lines: Sequence[StoredLine], figures: Figures) -> Iterator[str]:
    yield f"## {GROUPS[test].title}"
    yield ""
    rows = [COLUMNS, *(row for line in lines for row in _rows(line, figures))]
    # A column without a cell, such as the ratio of a line without a peer, is left out.
    filled = [place for place in range(len(COLUMNS)) if any(row[place] for row in rows[1:])]
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row[place] for place in filled)} |"
        if number == 0:
            yield "|" + "---|" * len(filled)
    yield ""
    commands = (f"`{run.shell}`" for run in RUNS if run.test == test)
    yield f"Measured by {', '.join(commands)}."


def _rows(line: StoredLine, figures: Figures) -> Iterator[Sequence[str]]:
    """The cells of each side, in the order of the columns."""
    for side in line.sides:
        yield (
            line.name,
            side,
            _value(line, RATE, side),
            _found(line.ratio(RATE, side)),
            _value(line, PROCESSOR_TIME, side),
            _found(line.ratio(PROCESSOR_TIME, side)),
            _spreads(line, side),
            _more(line, side),
            _claims(line, side, figures),
            line.measured,
        )


def _value(line: StoredLine, figure: str, side: str) -> str:
    found = line.median(figure, side)
    return "" if found is None else f"{shown(found)} {line.unit(figure)}"


def _spreads(line: StoredLine, side: str) -> str:
    """The spreads of the rate and of the processor time."""
    found = (line.spread(figure, side) for figure in (RATE, PROCESSOR_TIME))
    return ", ".join(f"{each:.0%}" for each in found if each is not None)


def _more(line: StoredLine, side: str) -> str:
    """The figures besides these two that are not zero, with their ratios."""
    texts = []
    for figure in line.figures:
        value = _value(line, figure, side)
        if line.median(figure, side) and figure not in (RATE, PROCESSOR_TIME):
            ratio = line.ratio(figure, side)
            texts.append(f"{figure} {value}" + ("" if ratio is None else f" ({shown(ratio)})"))
    return "; ".join(texts)


def _claims(line: StoredLine, side: str, figures: Figures) -> str:
    if side != CLAIMED:
        return ""
    verdicts = figures.verdicts(line.test, line.name)
    return "; ".join(f"**{each}**" if each.fails else str(each) for each in verdicts)


def _machines(figures: Figures) -> Iterator[str]:
    """The machines and versions of the lines, with their days."""
    days: dict[str, dict[str, None]] = {}
    for line in figures.lines.values():
        machine = line.run["machine"]
        versions = ", ".join(f"{name} {each}" for name, each in machine["packages"].items())
        days.setdefault(f"{describe(machine)}; {versions}", {})[line.run["date"][:10]] = None
    yield from ("## Machines and versions", "")
    yield from (f"- {', '.join(sorted(dates))}: {text}." for text, dates in days.items())
