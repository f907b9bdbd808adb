"""OpenAI's requests to a model with a rollout: keys, and the version of the answer."""

import asyncio
from typing import Any

import httpx
import pytest

from gateway.frontends.http.app import build_app
from gateway.rollouts.choice import VersionChoice, digest_of
from gateway.rollouts.plan import KeyPlace
from tests.builders import ScriptedInstance, soon
from tests.conftest import Serve
from tests.gateway.frontends.http.conftest import Open
from tests.gateway.frontends.http.openai.conftest import CHAT, body, chunk, dataplane_of
from tests.gateway.frontends.http.openai.conftest import SETTINGS as HTTP

PATH = "/v1/chat/completions"
FIRST, LAST = sorted(map(str, range(20)), key=lambda user: digest_of(b"", user.encode()))[::19]
"""The users that get the candidate at the lowest and at the highest weight."""


class Rolling:
    """A client of two versions that share requests half and half, by `user` or `X-User`."""

    def __init__(self, serve: Serve, connect: Open) -> None:
        self.instances = ScriptedInstance(None), ScriptedInstance(None)
        stable, candidate = (serve(each, config=CHAT) for each in self.instances)
        candidate.version = "2"
        dataplane = dataplane_of(stable)
        keys = KeyPlace("header", "x-user"), KeyPlace("openai", "user")
        choice = VersionChoice(stable, candidate, dataplane.conversations, keys)
        choice.weight = 50
        stable.chooser = candidate.chooser = choice
        self.client = connect(build_app(dataplane, HTTP, "triton"))

    async def ask(self, version: int, headers: dict[str, str], **members: Any) -> httpx.Response:
        """The answer, which that version makes."""
        content = body(model="chat", messages=[], **members)
        asking = asyncio.ensure_future(self.client.post(PATH, content=content, headers=headers))
        execution = await self.instances[version - 1].begun()
        execution.answer(chunk("{}", final=True))
        execution.end()
        return await soon(asking)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_version_that_answers_is_a_header(
    serve: Serve, connect: Open, stream: bool
) -> None:
    rolling = Rolling(serve, connect)
    for user, version in ((FIRST, 2), (LAST, 1)):
        found = await rolling.ask(version, {}, user=user, stream=stream)
        assert found.headers["x-sluice-model-version"] == str(version)


async def test_a_header_decides_before_a_member(serve: Serve, connect: Open) -> None:
    rolling = Rolling(serve, connect)
    for first, second, version in ((FIRST, LAST, 2), (LAST, FIRST, 1)):
        found = await rolling.ask(version, {"X-User": first}, user=second)
        assert found.headers["x-sluice-model-version"] == str(version)


async def test_a_model_without_a_rollout_answers_without_the_header(
    client: httpx.AsyncClient, instance: ScriptedInstance
) -> None:
    asking = asyncio.ensure_future(client.post(PATH, content=body(model="chat", messages=[])))
    execution = await instance.begun()
    execution.answer(chunk("{}", final=True))
    execution.end()
    assert "x-sluice-model-version" not in (await soon(asking)).headers
