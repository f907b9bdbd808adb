"""The HTTP application: its routes, and what an error becomes."""

import logging

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway import __version__
from gateway.dataplane import DataPlane
from gateway.errors import UNEXPECTED, InferenceError
from gateway.frontends.http.control import ControlRoutes
from gateway.frontends.http.errors import error_response, plain_error
from gateway.frontends.http.generate import GenerateRoutes
from gateway.settings import HttpSettings

log = logging.getLogger("sluice.http")


def build_app(dataplane: DataPlane, settings: HttpSettings, server_id: str) -> FastAPI:
    """A FastAPI application whose hot routes are plain ones."""
    app = FastAPI(
        title="Sluice",
        version=__version__,
        redirect_slashes=False,
        exception_handlers={
            InferenceError: _refused,
            HTTPException: _not_routed,
            RequestValidationError: _invalid,
            Exception: _unexpected,
        },
    )
    app.router.routes.extend(GenerateRoutes(dataplane, settings).routes())
    app.include_router(ControlRoutes(dataplane, server_id).router())
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, InferenceError)  # noqa: S101 - what this handler is registered for
    log.warning(
        "request refused",
        extra={"path": request.url.path, "code": error.code.name, "reason": error.message},
    )
    return error_response(error)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - what this handler is registered for
    return plain_error(error.status_code, error.detail)


async def _invalid(request: Request, error: Exception) -> Response:
    return plain_error(400, f"invalid path or query of {request.url.path}")


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback where it catches the exception; the client learns nothing of it.
    return error_response(UNEXPECTED)
