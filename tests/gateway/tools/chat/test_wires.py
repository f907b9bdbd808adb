"""A running server as the chat sees it, by either wire."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from gateway.tools.chat.command import connect
from gateway.tools.chat.server import (
    AnswerPart,
    ChatModel,
    ChatServer,
    Question,
    Refused,
    Unreachable,
)
from tests.gateway.tools.chat.conftest import Talking

WIRES = ("grpc", "http")


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
async def server(talking: Talking, wire: str) -> AsyncIterator[ChatServer]:
    found = await connect(url(talking, wire), http=wire == "http")
    yield found
    await found.close()


def url(talking: Talking, wire: str) -> str:
    return talking.server.http if wire == "http" else talking.server.grpc


async def asked(
    server: ChatServer, text: str, model: str = "talker", **sampling: object
) -> Question:
    messages = [{"role": "user", "content": text}]
    return Question(await server.describe(model), messages, sampling)


async def parts(server: ChatServer, text: str, **sampling: object) -> list[AnswerPart]:
    question = await asked(server, text, **sampling)
    async with aclosing(server.answer(question)) as found:
        return [part async for part in found]


async def test_the_index_has_every_model_and_its_state(server: ChatServer) -> None:
    rows = await server.models()
    assert rows is not None
    assert {row.name: row.ready for row in rows} == {"talker": True, "plain": True, "bare": False}


async def test_a_model_is_described_by_its_inputs_and_outputs(server: ChatServer) -> None:
    model = await server.describe("talker")
    assert model.chats
    assert model.platform == "python"
    assert model.inputs["sampling_parameters"] == 1
    assert "finish_reason" in model.outputs


async def test_an_unknown_model_is_refused_with_the_servers_words(server: ChatServer) -> None:
    with pytest.raises(Refused, match="unknown model: 'a%b' is not found"):
        await server.describe("a%b")


async def test_an_answer_comes_in_parts_with_their_tokens_and_its_end(server: ChatServer) -> None:
    found = await parts(server, "count 3")
    assert [part.text for part in found] == ["word0 ", "word1 ", "word2 ", ""]
    assert [part.tokens for part in found] == [1, 1, 1, 0]
    assert found[-1].finish_reason == "stop"


async def test_sampling_arrives_as_it_was_set(server: ChatServer) -> None:
    (said, _) = await parts(server, "sampling", stop=["a", "ä"], temperature=0)
    assert json.loads(said.text) == {"stop": ["a", "ä"], "temperature": 0}


async def test_words_of_any_script_arrive_whole(server: ChatServer) -> None:
    text = 'recall "quoted" \\ Straße 東京 🙂'
    (said, _) = await parts(server, text)
    assert json.loads(said.text)[-1]["content"] == text


async def test_the_least_model_that_can_chat_gets_parameters(
    server: ChatServer, talking: Talking
) -> None:
    with talking.bare_loaded():
        question = await asked(server, "Hi", "bare", temperature=0.5, seed=7, stop="x")
        async with aclosing(server.answer(question)) as found:
            (part,) = [part async for part in found]
    assert part.tokens is None
    said, _, given = part.text.partition(" messages, ")
    assert said == "1"
    assert json.loads(given) == {"temperature": 0.5, "seed": 7, "stop": "x"}


async def test_the_error_of_a_model_is_shown_unchanged(server: ChatServer) -> None:
    with pytest.raises(Refused, match=r"^the model says no$"):
        await parts(server, "refuse")


async def test_parts_before_an_error_are_received(server: ChatServer) -> None:
    async with aclosing(server.answer(await asked(server, "refuse-late"))) as found:
        assert (await anext(found)).text == "so far so good"
        with pytest.raises(Refused, match="the model gives up"):
            await anext(found)


async def test_a_missing_chat_template_is_named(server: ChatServer) -> None:
    with pytest.raises(Refused, match="'talker' has no chat template"):
        await parts(server, "no-template")


async def test_closing_an_answer_stops_the_model(
    server: ChatServer, talking: Talking, wire: str
) -> None:
    text = f"forever {wire}"
    async with aclosing(server.answer(await asked(server, text))) as found:
        assert (await anext(found)).text == "word0 "
    await asyncio.to_thread(talking.wait_stopped, text)


async def test_a_cancelled_wait_for_an_answer_stops_the_model(
    server: ChatServer, talking: Talking, wire: str
) -> None:
    text = f"forever cancelled by {wire}"
    first = asyncio.Event()

    async def read() -> None:
        async with aclosing(server.answer(await asked(server, text))) as found:
            async for _ in found:
                first.set()

    reader = asyncio.create_task(read())
    await first.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.to_thread(talking.wait_stopped, text)


async def test_an_unreachable_server_is_named_with_the_reason(wire: str, unused_port: int) -> None:
    server = await connect(f"localhost:{unused_port}", http=wire == "http")
    with pytest.raises(Unreachable, match=r"no server answers at .*Connection refused"):
        await server.models()
    await server.close()


async def test_the_port_of_the_other_wire_is_recognised(talking: Talking, wire: str) -> None:
    other = talking.server.grpc if wire == "http" else talking.server.http
    server = await connect(other.removeprefix("http://"), http=wire == "http")
    fix = "is it the gRPC port" if wire == "http" else "speaks HTTP instead of gRPC"
    with pytest.raises(Refused, match=fix):
        await server.models()
    await server.close()


async def test_what_a_question_cannot_be_asked_with_is_refused_before_it_is_sent(
    server: ChatServer,
) -> None:
    model = ChatModel("talker", "python", {"messages": 1}, frozenset({"text_output"}))
    with pytest.raises(Refused, match="'stop' is"):
        await anext(server.answer(Question(model, [], {"stop": ["a"]})))
