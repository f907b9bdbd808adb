"""How does Triton read the numbers and switches of a model's parameters?"""

from collections.abc import Mapping

from gateway.errors import Code, InferenceError

TRUE = frozenset({"true", "on", "1"})
FALSE = frozenset({"false", "off", "0"})


def integer(parameters: Mapping[str, str], key: str, default: int = 0) -> int:
    """The whole number under that key; InferenceError INVALID_ARG if it is none."""
    text = parameters.get(key, str(default)).strip()
    try:
        return int(text)
    except ValueError:
        raise _unreadable(key, text, "integral number") from None


def count(parameters: Mapping[str, str], key: str, default: int = 0) -> int:
    """The number of at least 0 under that key; InferenceError INVALID_ARG if it is none."""
    found = integer(parameters, key, default)
    if found < 0:
        raise InferenceError(
            Code.INVALID_ARG, f"parameter '{key}' is {found}, expected a number of at least 0"
        )
    return found


def switch(parameters: Mapping[str, str], key: str, *, default: bool) -> bool:
    """Whether that key is on; InferenceError INVALID_ARG if it says neither yes nor no."""
    text = parameters.get(key, str(default)).strip()
    if text.lower() in TRUE | FALSE:
        return text.lower() in TRUE
    raise _unreadable(key, text, "boolean")


def _unreadable(key: str, text: str, kind: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG, f"parameter '{key}': failed to convert '{text}' to {kind}"
    )
