"""How the path of a request names a model and its version."""

from starlette.exceptions import HTTPException
from starlette.requests import Request

MODEL = "/v2/models/{model}"
VERSION = "/v2/models/{model}/versions/{version}"


def version_of(request: Request) -> str:
    """The version in the path, "" if it has none; 404 if it is no number (protocol: HTTP routes).

    It may have more digits than any integer type: whoever looks it up refuses that.
    """
    version: str = request.path_params.get("version", "")
    if not is_version(version):
        raise HTTPException(404)
    return version


def is_version(text: str) -> bool:
    """Whether that is a number, or nothing."""
    return not text or (text.isascii() and text.isdigit())
