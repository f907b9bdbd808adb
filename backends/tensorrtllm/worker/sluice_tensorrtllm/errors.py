"""Errors of a request or of a load, with a text for clients."""

import re
from itertools import takewhile

MAX_TEXT = 1000
_HOST_PATH = re.compile(
    r"""(?<=["'])(?:file:/)?/[^"'\n]*/[^"'\n]*(?=["'])"""  # in quotes it may have spaces
    r"""|file://[^\s"']*"""
    r"""|(?<![\w:/.])/(?:[\w.@+-]+/)+[\w.@+-]*"""
)
_NAME = re.compile("[A-Za-z0-9_]+")


class Refusal(Exception):
    """The text is for clients; `code` is the name of one of Triton's codes."""

    def __init__(self, message: str, code: str = "INVALID_ARG") -> None:
        super().__init__(message)
        self.code = code


def clean(error: BaseException) -> str:
    """The text of a library's exception: its first error, without paths of the host, bounded."""
    text = _HOST_PATH.sub("<path>", _first_mistake(error))
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def _first_mistake(error: BaseException) -> str:
    """pydantic lists all errors with values and links; only the first error is used."""
    mistakes = getattr(error, "errors", None)
    if not callable(mistakes):
        return str(error) or type(error).__name__
    first = mistakes()[0]
    place = ".".join(takewhile(_NAME.fullmatch, map(str, first["loc"])))
    return f"'{place}': {first['msg']}" if place else str(first["msg"])
