"""Findings of the doctor, as a table and as data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.markup import escape
from rich.table import Table

from gateway import __version__


class Health(StrEnum):
    """The effect of a finding on serving.

    CANNOT is a missing part, so some models cannot be served; BROKEN is an installed part that does
    not work.
    """

    OK = "ok"
    WARNING = "warning"
    CANNOT = "cannot"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one part of the machine; if the verdict is not OK, `fix` is the remedy."""

    what: str
    found: str
    verdict: Health = Health.OK
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Findings under one heading."""

    name: str
    findings: Sequence[Finding]


def is_broken(parts: Sequence[Section]) -> bool:
    """Whether an installed part does not work."""
    return any(each.verdict is Health.BROKEN for part in parts for each in part.findings)


def size(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit != "GiB" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


COLOURS = {
    Health.OK: "green",
    Health.WARNING: "yellow",
    Health.CANNOT: "magenta",
    Health.BROKEN: "bold red",
}


def table(parts: Sequence[Section]) -> Table:
    """A row for each finding, with a line between sections."""
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


def summary(parts: Sequence[Section]) -> str:
    """The number of findings of each verdict, in one line."""
    verdicts = [each.verdict for part in parts for each in part.findings]
    return ", ".join(f"{verdicts.count(each)} {each}" for each in Health)


def data(parts: Sequence[Section]) -> dict[str, Any]:
    """The findings for JSON."""

    return {
        "sluice": __version__,
        "broken": is_broken(parts),
        "findings": [
            {"part": part.name, **asdict(each)} for part in parts for each in part.findings
        ],
    }
