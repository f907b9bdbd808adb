"""Results of golden requests, as a loaded version keeps them."""

from dataclasses import dataclass
from enum import StrEnum


class GoldenOutcome(StrEnum):
    """Outcomes of a golden request; one with a check that cannot be made is skipped."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenResult:
    """The outcome of a golden request on an instance; `reason` is empty if it passed."""

    name: str
    outcome: GoldenOutcome
    reason: str = ""
    secs: float = 0.0
    why: str = ""
