"""Names of models in requests to load them."""

from unicodedata import normalize

from gateway.errors import Code, InferenceError
from gateway.models.model_folder import SHOWN_CHARS

NAME_BYTES = 255
"""Longest name of a folder on Linux."""


def check_name(name: str) -> None:
    """Raise INVALID_ARG for a name that is empty or a path."""
    if not name.strip():
        raise InferenceError(
            Code.INVALID_ARG, "Model name cannot be empty. Please enter a valid name to deploy."
        )
    if "/" in name or "\0" in name or name.strip() == "..":
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid model name '{name}', model name must not contain path traversal characters",
        )


def check_new_name(name: str) -> None:
    """Raise INVALID_ARG for a name that is not on disk, and that pages and logs cannot show."""
    size = len(name.encode(errors="replace"))
    is_shown = name.isprintable() and name == name.strip() and "\\" not in name
    if size > NAME_BYTES or not is_shown or normalize("NFC", name) != name:
        raise InferenceError(
            Code.INVALID_ARG,
            f"invalid model name {name[:SHOWN_CHARS]!a} of {size} bytes, expected at most "
            f"{NAME_BYTES} bytes of printable characters in the form NFC, without backslashes and "
            "without blanks at its ends",
        )
