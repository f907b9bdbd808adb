"""Errors of model.py's API, and exceptions as the gateway reads them."""

import re
import traceback
from enum import IntEnum

TRACE_LIMIT = 1 << 16
"""Characters of a traceback in the server's log, counted from its end."""
_QUOTED = r"(?:(?!\1(?!\w)).)*"
"""The text before a closing quote, which no letter follows: `'/srv/o'brien/x y'` has one."""
HOST_PATH = re.compile(
    rf"""(?<=(["']))(?:file:/)?/(?={_QUOTED}/){_QUOTED}(?=\1)"""  # in quotes it may have spaces
    r"""|file://[^\s"']*"""
    r"""|(?<![\w:/.])/(?:[\w.@+-]+/)+[\w.@+-]*"""
)
MAX_LINE = 500


class TritonModelException(Exception):
    """A function of `triton_python_backend_utils` failed."""


class BadAnswer(Exception):
    """Model code broke a rule; the text is the whole message.

    `code` is the name of one of Triton's codes; the error of a failed load has it.
    """

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(message)
        self.code = code


class ErrorCode(IntEnum):
    """Triton's codes, numbered as it numbers them."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


CODES = frozenset(ErrorCode)


class TritonError:
    """The error of one request; the client gets code and message unchanged."""

    __slots__ = ("_code", "_message")

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str, code: int = ErrorCode.INTERNAL) -> None:
        if not isinstance(message, str):
            raise TypeError(f"message of TritonError must be a str, found {type(message)}")
        if code not in CODES:
            raise TypeError(f"code of TritonError must be one of its codes, found {code!r}")
        self._message = message
        self._code = ErrorCode(code)

    def message(self) -> str:
        """The text for the client."""
        return self._message

    def code(self) -> ErrorCode:
        """One of the codes of this class."""
        return self._code


def described_failure(error: BaseException) -> list[str]:
    """An exception as `Type: text`, and its trace for the server's log."""
    if isinstance(error, BadAnswer):
        return [str(error), ""]
    text = f"{type(error).__name__}: {_text(error) or '<EMPTY MESSAGE>'}"
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return [text, "".join(lines)[-TRACE_LIMIT:]]


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, without paths of the host, bounded."""
    lines = HOST_PATH.sub("<path>", _text(error)).strip().splitlines()
    return lines[0].strip()[:MAX_LINE] if lines else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception class of model.py's may raise in its own text
        return ""
