"""OpenAI's endpoints over a real data plane, with models that the tests drive by hand."""

from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest
from starlette.types import ASGIApp

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.dataplane import DataPlane
from gateway.frontends.http.app import build_app
from gateway.messages import InferResponse, Parameter
from gateway.models.model import Model
from gateway.openai_contract import EVENT
from gateway.settings import HttpSettings
from gateway.tensor import text_tensor
from tests.builders import DECOUPLED, LoadedModels, ScriptedInstance, soon
from tests.conftest import Serve
from tests.gateway.frontends.http.conftest import Open

SETTINGS = HttpSettings(max_input_size=1000, first_response_secs=60.0, keep_alive_secs=60.0)
TEXT = DataType.TYPE_STRING


def tensor_in(name: str, kind: DataType = TEXT, *dims: int, optional: bool = False) -> ModelInput:
    """An input, with one element if there are no dims."""
    return ModelInput(name=name, data_type=kind, dims=dims or (1,), optional=optional)


def tensor_out(name: str, kind: DataType = TEXT, *dims: int) -> ModelOutput:
    """An output, with one element if there are no dims."""
    return ModelOutput(name=name, data_type=kind, dims=dims or (1,))


CHAT = ModelConfig(
    name="chat",
    backend="python",
    input=(tensor_in("openai_request"), tensor_in("openai_endpoint", optional=True)),
    output=(tensor_out("openai_response"),),
    model_transaction_policy=DECOUPLED,
)
"""A model with the whole contract."""

CHAT_ONLY = replace(CHAT, name="chat_only", input=CHAT.input[:1])
"""A model without an input for the purpose of a request."""

ENCODER = ModelConfig(
    name="encoder",
    backend="python",
    input=(tensor_in("text"),),
    output=(tensor_out("embedding", DataType.TYPE_FP32, 4),),
)
"""A model that embeds and knows nothing of OpenAI."""


def chunk(text: str, event: str = "", *, final: bool = False) -> InferResponse:
    """A response of a model with the contract."""
    parameters: dict[str, Parameter] = {EVENT: event} if event else {}
    outputs = (text_tensor("openai_response", [text]),)
    return InferResponse(outputs=outputs, parameters=parameters, final=final)


def dataplane_of(*models: Model) -> DataPlane:
    """A data plane over these models."""
    return DataPlane(LoadedModels(*models))  # type: ignore[arg-type] # stands in for the registry


def app_of(*models: Model, settings: HttpSettings = SETTINGS) -> ASGIApp:
    """The HTTP application over these models."""
    return build_app(dataplane_of(*models), settings, "triton")


def body(**members: Any) -> bytes:
    """The JSON of a request."""
    return orjson.dumps(members)


ASK = body(model="chat", messages=[], temperature=0.5)
"""A request to the model `chat`."""


async def answer(
    client: httpx.AsyncClient, content: bytes = ASK, path: str = "/v1/chat/completions"
) -> httpx.Response:
    """The response to a request."""
    return await soon(client.post(path, content=content))


@pytest.fixture
async def instance() -> ScriptedInstance:
    """The part that the test drives."""
    return ScriptedInstance(None)


@pytest.fixture
async def client(serve: Serve, connect: Open, instance: ScriptedInstance) -> httpx.AsyncClient:
    """A client of a server with the model `chat`."""
    return connect(app_of(serve(instance, config=CHAT)))
