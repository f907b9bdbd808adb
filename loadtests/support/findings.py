"""Figures with bounds: what a load test found, and whether its bound holds."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtests.support.results import Results, number
from loadtests.support.rounds import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A value that is at least `least` and at most `most`; None for no bound."""

    figure: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the value is within its bounds."""
        low, high = self.least, self.most
        return (low is None or self.value >= low) and (high is None or self.value <= high)

    @property
    def shown(self) -> str:
        """The value with its unit."""
        return f"{number(self.value)} {self.unit}".rstrip()

    @property
    def bound(self) -> str:
        """The bounds in words; "" for none."""
        words = ("at least", self.least), ("at most", self.most)
        return ", ".join(f"{word} {number(each)}" for word, each in words if each is not None)

    @property
    def verdict(self) -> str:
        """`holds` or `fails`; "" without a bound."""
        if self.least is None and self.most is None:
            return ""
        return "holds" if self.holds else "fails"


Part = Callable[[argparse.Namespace, Path, Console, Results], Sequence[Finding]]
"""One part of a test with an empty folder; it adds its values to the results."""


def report_of(
    title: str,
    parts: Mapping[str, Part],
    asked: argparse.Namespace,
    folder: Path,
    console: Console,
) -> Report:
    """Run the parts that `--parts` names; a bound that does not hold is a failure."""
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    for heading in ("found", "bound", ""):
        table.add_column(heading, justify="right")
    results, failures = Results(), []
    for name in asked.parts:
        (folder / name).mkdir()
        for each in parts[name](asked, folder / name, console, results):
            table.add_row(f"{name}: {each.figure}", each.shown, each.bound, each.verdict)
            failures += [] if each.holds else [f"{name}: {each.figure}"]
    failure = f"the bound fails for {', '.join(failures)}" if failures else ""
    return Report(table, results.as_lines(), failure=failure)
