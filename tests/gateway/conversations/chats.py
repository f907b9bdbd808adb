"""A chat model that a test drives by hand, and the clients that talk to it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import pytest

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.conversations.conversations import Conversations
from gateway.conversations.history import ByteLimits
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, SequenceTag
from gateway.models.model import Model
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, Tensor
from tests.builders import DECOUPLED, Execution, LoadedModels, ScriptedInstance, text_response

CHAT = ModelConfig(
    name="chat",
    backend="identity",
    input=(ModelInput(name="messages", data_type=DataType.TYPE_STRING, dims=(1,)),),
    output=(ModelOutput(name="text_output", data_type=DataType.TYPE_STRING, dims=(-1,)),),
    model_transaction_policy=DECOUPLED,
)
"""Messages in, text out, any number of responses."""

Id = int | str


def chat(**parameters: object) -> ModelConfig:
    """CHAT with parameters."""
    return replace(CHAT, parameters={key: str(value) for key, value in parameters.items()})


def dataplane_of(*models: Model) -> DataPlane:
    """A data plane over models that a test has loaded."""
    return DataPlane(LoadedModels(*models))  # type: ignore[arg-type]


def turn(
    text: str,
    conversation: Id = 1,
    *,
    start: bool = False,
    end: bool = False,
    request_id: str = "",
    **fields: Any,
) -> InferRequest:
    """A turn that says one thing."""
    return raw_turn(
        json.dumps([user(text)]), SequenceTag(conversation, start, end), request_id, **fields
    )


def raw_turn(
    messages: str, tag: SequenceTag | None, request_id: str = "", **fields: Any
) -> InferRequest:
    """A turn with any text in its messages."""
    tensor = Tensor("messages", Datatype.BYTES, (1,), (messages.encode(),))
    fields = {"inputs": (tensor,), **fields}
    return InferRequest(model="chat", id=request_id, sequence=tag, **fields)


def user(text: str) -> Mapping[str, str]:
    """The turn of a client."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Mapping[str, str]:
    """The turn of the model."""
    return {"role": "assistant", "content": text}


def told(execution: Execution) -> list[Mapping[str, str]]:
    """The messages that the model was given."""
    (request,) = execution.requests
    assert request.sequence is None
    (messages,) = request.inputs
    found: list[Mapping[str, str]] = json.loads(messages.elements()[0])
    return found


class Door(Protocol):
    """The entrance of requests."""

    def infer(self, request: InferRequest) -> ResponseStream:
        """Submit a request."""


class Narrow:
    """Conversations that have little room, and the models that are asked by them."""

    def __init__(self, each: int, total: int) -> None:
        self.conversations = Conversations(limits=ByteLimits(each, total))
        self._models: dict[str, Model] = {}

    def add(self, model: Model) -> None:
        """Have requests for a model of that name."""
        self._models[model.name] = model

    def infer(self, request: InferRequest) -> ResponseStream:
        """Submit a request to the model that it names."""
        model = self._models[request.model]
        return model.submit(request, None, self.conversations.turn(request, model))


class Talk:
    """A client that waits for each answer."""

    def __init__(self, dataplane: Door, instance: ScriptedInstance) -> None:
        self.dataplane = dataplane
        self.instance = instance

    async def say(
        self, text: str, answer: str, conversation: Id = 1, **options: Any
    ) -> list[Mapping[str, str]]:
        """Have one turn answered; what the model was given."""
        with self.dataplane.infer(turn(text, conversation, **options)) as stream:
            execution = await self.instance.begun()
            execution.finish(answer)
            await stream.batch()
        return told(execution)


async def interrupted(stream: ResponseStream, execution: Execution, text: str) -> None:
    """Let a model answer, and its client read the answer."""
    execution.answer(text_response(text))
    await stream.batch()


def refusal(door: Door, request: InferRequest) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        door.infer(request)
    return caught.value.code, caught.value.message


async def read_all_bytes(stream: ResponseStream) -> None:
    """Read to the end what need not be whole characters."""
    while await stream.batch():
        pass
