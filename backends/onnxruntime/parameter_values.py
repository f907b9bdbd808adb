"""Numbers and switches in parameters, as Triton reads them."""

from collections.abc import Mapping

from gateway.errors import Code, InferenceError

TRUE = frozenset({"true", "on", "1"})
FALSE = frozenset({"false", "off", "0"})
LARGEST = 2**31 - 1
"""The largest count that the library accepts."""


def integer(parameters: Mapping[str, str], key: str, default: int = 0) -> int:
    """The integer under that key; InferenceError INVALID_ARG if it is invalid."""
    text = parameters.get(key, str(default)).strip()
    try:
        return int(text)
    except ValueError:
        raise _unreadable(key, text, "integral number") from None


def count(parameters: Mapping[str, str], key: str, default: int = 0) -> int:
    """The number from 0 to LARGEST under that key; InferenceError INVALID_ARG if it is invalid."""
    found = integer(parameters, key, default)
    if not 0 <= found <= LARGEST:
        raise InferenceError(
            Code.INVALID_ARG,
            f"parameter '{key}' is {found}, expected a number from 0 to {LARGEST}",
        )
    return found


def switch(parameters: Mapping[str, str], key: str, *, default: bool) -> bool:
    """Whether that key is on; InferenceError INVALID_ARG if it is invalid."""
    text = parameters.get(key, str(default)).strip()
    if text.lower() in TRUE | FALSE:
        return text.lower() in TRUE
    raise _unreadable(key, text, "boolean")


def _unreadable(key: str, text: str, kind: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG, f"parameter '{key}': failed to convert '{text}' to {kind}"
    )
