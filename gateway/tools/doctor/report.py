"""Findings as a table, and as data."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from gateway import __version__
from gateway.tools.doctor.finding import Part, Verdict, is_broken

COLOURS = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.CANNOT: "magenta",
    Verdict.BROKEN: "bold red",
}


def table(parts: Sequence[Part]) -> Table:
    """A row for each finding, the parts apart."""
    made = Table(title=f"Sluice {__version__} on this machine", title_justify="left", expand=True)
    made.add_column("what", overflow="fold", ratio=3)
    made.add_column("found", overflow="fold", ratio=5)
    made.add_column("verdict", no_wrap=True)
    made.add_column("fix", overflow="fold", ratio=5)
    for part in parts:
        made.add_row(f"[bold]{part.name}[/]")
        for each in part.findings:
            verdict = f"[{COLOURS[each.verdict]}]{each.verdict}[/]"
            made.add_row(*map(escape, (each.what, each.found)), verdict, escape(each.fix))
        made.add_section()
    return made


def summary(parts: Sequence[Part]) -> str:
    """One line that says how it went."""
    verdicts = [each.verdict for part in parts for each in part.findings]
    return ", ".join(f"{verdicts.count(each)} {each}" for each in Verdict)


def data(parts: Sequence[Part]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "sluice": __version__,
        "broken": is_broken(parts),
        "findings": [
            {"part": part.name, **asdict(each)} for part in parts for each in part.findings
        ],
    }
