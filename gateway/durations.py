"""Durations with a unit, such as 30s, 1.5h or 90d."""

import re

DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|d|w)")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def read_seconds(text: str) -> float | None:
    """The seconds of a duration, which may be 0; None for any other text."""
    found = DURATION.fullmatch(text)
    return float(found[1]) * SECONDS[found[2]] if found is not None else None
