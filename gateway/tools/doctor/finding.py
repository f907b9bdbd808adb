"""One thing that was looked at: what was found, whether it will do, and what to do if not."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How well a machine serves with what was found.

    CANNOT is a thing that is not there, so that something cannot be served; BROKEN is one that is
    there and does not work.
    """

    OK = "ok"
    WARNING = "warning"
    CANNOT = "cannot"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one thing; where the verdict is not OK, `fix` says what helps."""

    what: str
    found: str
    verdict: Verdict = Verdict.OK
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Findings that belong together."""

    name: str
    findings: Sequence[Finding]


def is_broken(parts: Sequence[Part]) -> bool:
    """Whether something that is installed does not work."""
    return any(each.verdict is Verdict.BROKEN for part in parts for each in part.findings)


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit != "GiB" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
