"""A chat model behind a data plane."""

import pytest

from gateway.dataplane import DataPlane
from tests.builders import (
    ScriptedInstance,
)
from tests.conftest import Serve
from tests.gateway.conversations.chats import (
    CHAT,
    Talk,
    dataplane_of,
)


@pytest.fixture
async def instance() -> ScriptedInstance:
    return ScriptedInstance()


@pytest.fixture
async def dataplane(serve: Serve, instance: ScriptedInstance) -> DataPlane:
    return dataplane_of(serve(instance, config=CHAT))


@pytest.fixture
async def talk(dataplane: DataPlane, instance: ScriptedInstance) -> Talk:
    return Talk(dataplane, instance)
