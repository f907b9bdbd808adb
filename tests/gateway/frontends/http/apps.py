"""Applications over a real data plane, and requests to them."""

from typing import Any

import orjson
from starlette.types import ASGIApp

from backends.identity import Behaviour, IdentityInstance
from gateway.dataplane import DataPlane
from gateway.frontends.http.app import build_app
from gateway.models.model import Model
from gateway.settings import HttpSettings
from tests.builders import (
    LoadedModels,
)
from tests.exchange import Exchange

SETTINGS = HttpSettings(max_input_size=1000, first_response_secs=60.0, keep_alive_secs=60.0)


ASK = {"text_input": "hi"}


def app_of(*models: Model, settings: HttpSettings = SETTINGS) -> ASGIApp:
    return build_app(DataPlane(LoadedModels(*models)), settings, "triton")  # type: ignore[arg-type]


def identity(**behaviour: Any) -> IdentityInstance:
    return IdentityInstance(Behaviour(**behaviour), {"text_input": "text_output"})


def generate(exchange_app: ASGIApp, model: str, verb: str, **members: Any) -> Exchange:
    body = orjson.dumps({**ASK, **members})
    return Exchange(exchange_app, f"/v2/models/{model}/{verb}", body)
