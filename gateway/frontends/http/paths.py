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
    if version and not (version.isascii() and version.isdigit()):
        raise HTTPException(404)
    return version
