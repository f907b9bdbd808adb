"""The choice of a chat model, and the errors without one."""

from collections.abc import Sequence

import pytest

from gateway.tools.chat.command import chat_models, named_model
from gateway.tools.chat.server import ChatError, ChatModel, Listed
from tests.gateway.tools.chat.played import PlayedServer, chat_model

TALKER = chat_model("talker")
ENCODER = ChatModel("encoder", "onnxruntime", {"ids": 2}, frozenset({"embedding"}))
HALF = ChatModel("half", "python", {"messages": 1}, frozenset({"tokens"}))


def listed(**states: str) -> Sequence[Listed]:
    return [Listed(name, *state.partition(":")[::2]) for name, state in states.items()]


def server(**states: str) -> PlayedServer:
    return PlayedServer(models=(TALKER, ENCODER, HALF), listed=listed(**states))


async def refused(found: PlayedServer, name: str) -> str:
    with pytest.raises(ChatError) as caught:
        await named_model(found, name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_a_ready_model_that_can_chat_is_found_by_its_name() -> None:
    assert await named_model(server(talker="READY", encoder="READY"), "talker") == TALKER


async def test_a_server_without_an_index_is_asked_for_the_model_itself() -> None:
    assert await named_model(PlayedServer(models=[TALKER]), "talker") == TALKER
    assert "unknown model: 'x'" in await refused(PlayedServer(models=[TALKER]), "x")


async def test_an_unknown_model_names_the_nearest_and_the_ready_ones() -> None:
    message = await refused(server(talker="READY", encoder="READY"), "tlker")
    assert message == ("there is no model 'tlker'; did you mean 'talker'; ready: encoder, talker")


async def test_a_model_that_is_not_ready_is_named_with_its_state() -> None:
    found = server(talker="UNAVAILABLE:unloaded", encoder="READY")
    assert await refused(found, "talker") == (
        "model 'talker' is not ready: UNAVAILABLE, unloaded; ready: encoder"
    )
    assert "is not ready: not loaded; ready: none" in await refused(server(talker=""), "talker")


async def test_one_ready_version_is_enough() -> None:
    rows = [Listed("talker", "UNAVAILABLE", "old"), Listed("talker", "READY", "")]
    found = PlayedServer(models=[TALKER], listed=rows)
    assert await named_model(found, "talker") == TALKER
    assert await chat_models(found) == [TALKER]


async def test_a_model_that_cannot_chat_is_named_with_its_tensors() -> None:
    states = {"encoder": "READY", "half": "READY"}
    assert "it has the inputs ids and the outputs embedding" in await refused(
        server(**states), "encoder"
    )
    assert "the outputs tokens" in await refused(server(**states), "half")


async def test_of_all_ready_models_those_that_can_chat_are_found() -> None:
    found = server(talker="READY", encoder="READY", half="READY", gone="READY", other="LOADING")
    assert await chat_models(found) == [TALKER]


async def test_without_a_chat_model_the_error_lists_all_models() -> None:
    with pytest.raises(ChatError) as caught:
        await chat_models(server(encoder="READY", talker="LOADING"))
    assert str(caught.value) == (
        "no model at played:1 can chat, which takes the input 'messages'; ready: encoder; "
        "not ready: talker (LOADING)"
    )


async def test_a_server_without_an_index_needs_a_name() -> None:
    with pytest.raises(ChatError, match="lists no models: name one"):
        await chat_models(PlayedServer(models=[TALKER]))
