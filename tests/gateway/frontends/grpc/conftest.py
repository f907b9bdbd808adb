"""Models for ModelStreamInfer: one is decoupled, one is not."""

import pytest

from gateway.models.model import Model
from tests.builders import (
    ScriptedInstance,
)
from tests.conftest import Serve
from tests.gateway.frontends.grpc.stream_clients import MANY, ONE


@pytest.fixture
async def many() -> ScriptedInstance:
    return ScriptedInstance()


@pytest.fixture
async def one() -> ScriptedInstance:
    return ScriptedInstance()


@pytest.fixture
async def models(serve: Serve, many: ScriptedInstance, one: ScriptedInstance) -> list[Model]:
    """`many` is decoupled, `one` is not."""
    return [serve(many, config=MANY), serve(one, config=ONE)]
