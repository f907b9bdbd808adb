"""Parameters as Triton's C++ backends read them, and the threads of instances."""

from collections.abc import Mapping

from gateway.config import InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.process_limits import processors

BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
LARGEST = 2**31 - 1
"""The largest count that a C++ runtime accepts."""
MOST_THREADS = 1024
"""Runtimes end the process if the system refuses a thread."""


def as_boolean(text: str) -> bool:
    """A boolean as Triton's parameters spell it; ValueError with Triton's text."""
    if text.lower() not in BOOLEANS:
        raise ValueError(f"failed to convert '{text}' to boolean")
    return BOOLEANS[text.lower()]


def as_integer(text: str) -> int:
    """An integer; ValueError with Triton's text."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"failed to convert '{text}' to integral number") from None


def integer(parameters: Mapping[str, str], key: str, default: int = 0) -> int:
    """The integer under that key; InferenceError INVALID_ARG if it is invalid."""
    try:
        return as_integer(parameters.get(key, str(default)).strip())
    except ValueError as error:
        raise _unreadable(key, error) from None


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
    try:
        return as_boolean(parameters.get(key, str(default)).strip())
    except ValueError as error:
        raise _unreadable(key, error) from None


def _unreadable(key: str, error: ValueError) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"parameter '{key}': {error}")


def instances_on_cpu(config: ModelConfig) -> int:
    """The number of instances that compute on the CPU, at least 1."""
    on_cpu = [group for group in config.instance_group if group.kind is not InstanceKind.KIND_GPU]
    return sum(max(1, group.count) for group in on_cpu) or 1


def thread_share(config: ModelConfig) -> int:
    """The threads of one instance if all instances of the model share the cores; at least 1."""
    return max(1, processors() // instances_on_cpu(config))
