"""Log settings as clients write and read them (logging extension)."""

from collections.abc import Callable, Mapping
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.settings import LogFormat, LogSettings

FILE = "log_file"
VERBOSE = "log_verbose_level"
FORMAT = "log_format"
BOOLEANS = {"log_info": "info", "log_warning": "warning", "log_error": "error"}
MAX_VERBOSE = 2**32 - 1


def shown(settings: LogSettings) -> dict[str, Any]:
    """The settings in force, in the order in which Triton tells them."""
    return {
        FILE: settings.file,
        "log_info": settings.info,
        "log_warning": settings.warning,
        "log_error": settings.error,
        VERBOSE: settings.verbose_level,
        FORMAT: settings.format.value,
    }


def changes(
    wanted: Mapping[str, Any], refused_format: Callable[[str], InferenceError]
) -> dict[str, Any]:
    """Fields of LogSettings for `Log.change`, from values of the right kinds.

    What is unknown is ignored. Raises UNSUPPORTED for the file, INVALID_ARG for a level beyond
    32 bits, and what `refused_format` says of a format that is not known.
    """
    if FILE in wanted:
        raise InferenceError(
            Code.UNSUPPORTED, "log file location can not be updated through network protocol"
        )
    found: dict[str, Any] = {
        field: wanted[name] for name, field in BOOLEANS.items() if name in wanted
    }
    if VERBOSE in wanted:
        found["verbose_level"] = _level(wanted[VERBOSE])
    if FORMAT in wanted:
        found["format"] = _format(wanted[FORMAT], refused_format)
    return found


def _level(level: int) -> int:
    if level > MAX_VERBOSE:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Unable to parse '{VERBOSE}', value is out of range [ 0, {MAX_VERBOSE} ], got: "
            f"{level}",
        )
    return level


def _format(text: str, refused: Callable[[str], InferenceError]) -> LogFormat:
    try:
        return LogFormat(text)
    except ValueError:
        raise refused(text) from None
