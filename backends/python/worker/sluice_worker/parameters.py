"""Parameters of requests and responses: a dictionary in, JSON text out, as Triton has them."""

import json
from typing import Any

from .errors import TritonModelException


def checked(parameters: Any) -> dict[str, Any] | None:
    """A copy of what model.py gives; TritonModelException says what cannot be a parameter."""
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise TritonModelException(f"Parameter '{key}' is {value}, which 64 bits cannot hold")
    return dict(parameters) or None


def text(parameters: dict[str, Any] | None) -> str:
    """What model.py has given, as JSON text; "" for none."""
    return json.dumps(parameters) if parameters else ""


def client_text(parameters: dict[str, Any]) -> str:
    """What a client has given, as JSON text in the form that Triton's server writes."""
    return json.dumps(parameters, separators=(",", ":"), ensure_ascii=False)
