"""Trace settings as clients write and read them: names and strings (trace extension)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.observability.trace import LEVELS
from gateway.settings import TraceSettings

LEVEL = "trace_level"
FILE = "trace_file"
OFF = "OFF"
MODE = "triton"
BOUNDS = {
    "trace_rate": ("rate", 0, 2**32 - 1),
    "trace_count": ("count", -1, 2**31 - 1),
    "log_frequency": ("log_frequency", 0, 2**32 - 1),
}
"""What holds one number: its field of TraceSettings, its least and its largest value."""

NUMBER = re.compile(r"-?[0-9]{1,32}")


def shown(settings: TraceSettings) -> dict[str, str | list[str]]:
    """The settings in force, in the order in which Triton tells them."""
    return {
        LEVEL: list(settings.levels) or [OFF],
        "trace_rate": str(settings.rate),
        "trace_count": str(settings.count),
        "log_frequency": str(settings.log_frequency),
        FILE: settings.file,
        "trace_mode": MODE,
    }


def changes(wanted: Mapping[str, Sequence[str] | None]) -> dict[str, Any]:
    """Fields of TraceSettings for `Tracer.update`; None clears one. What is unknown is ignored.

    Raises INVALID_ARG for what cannot be, UNSUPPORTED for the file.
    """
    if FILE in wanted:
        raise InferenceError(
            Code.UNSUPPORTED, "trace file location can not be updated through network protocol"
        )
    found: dict[str, Any] = {}
    if LEVEL in wanted:
        found |= _level_change(wanted[LEVEL])
    for name, (field, least, largest) in BOUNDS.items():
        if name in wanted:
            found[field] = _number(name, wanted[name], least, largest)
    return found


def _level_change(names: Sequence[str] | None) -> dict[str, Any]:
    """Unknown levels are ignored; if no other is there, nothing changes."""
    if names is None:
        return {"levels": None}
    if OFF in names:
        if len(names) > 1:
            raise InferenceError(Code.INVALID_ARG, "Expect only one trace level 'OFF' is specified")
        return {"levels": ()}
    levels = tuple(level for level in LEVELS if level in names)
    return {"levels": levels} if levels else {}


def _number(name: str, texts: Sequence[str] | None, least: int, largest: int) -> int | None:
    if texts is None:
        return None
    if len(texts) != 1:
        raise InferenceError(Code.INVALID_ARG, f"expect only 1 value for '{name}'")
    text = texts[0]
    if not NUMBER.fullmatch(text):
        raise InferenceError(Code.INVALID_ARG, f"Unable to parse '{name}', got: {text[:64]}")
    if least < 0 and int(text) < least:
        raise InferenceError(
            Code.INVALID_ARG, f"Unable to parse '{name}'. Expecting value >= {least}, got:{text}"
        )
    if not least <= int(text) <= largest:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Unable to parse '{name}', value is out of range [ {least}, {largest} ], got: {text}",
        )
    return int(text)
