"""Conversations and cancelling by id, as the official clients and plain HTTP see them."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http

from tests.conformance.clients import Client, text
from tests.conformance.turns import ask, flags, messages, said, stop, whole
from tests.leaving import IN_FLIGHT, accepted, noticed
from tests.raw import Connection
from tests.rpc import StreamRpc, connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving, wait_until

pytestmark = pytest.mark.runs_on("grpcio", "frontends")

CLIENT = Path(__file__).with_name("conversation_client.py")
LONG = "count 100000"
NOTICED_SECS = 1


@pytest.fixture(scope="module")
def stub(server: Serving) -> Iterator[Any]:
    with connected(server.grpc) as found:
        yield found


@pytest.fixture
def rpc(stub: Any) -> Iterator[StreamRpc]:
    with streaming(stub) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_stays_behind(server: Serving) -> Iterator[None]:
    yield
    server.wait_metric(IN_FLIGHT, "chatting", 0)
    server.wait_metric(IN_FLIGHT, "stuck", 0)


# Conversations on ModelStreamInfer.


def test_a_conversation_on_one_stream(rpc: StreamRpc) -> None:
    rpc.ask(ask("hello", "a", "one stream", start=True))
    assert whole(rpc) == "1: hello"
    rpc.ask(ask("again", "b", "one stream"))
    assert whole(rpc) == "3: hello|1: hello|again"
    rpc.ask(ask("bye", "c", "one stream", end=True))
    assert whole(rpc).startswith("5: hello|")
    rpc.ask(ask("still there?", "d", "one stream"))
    assert "is not open" in rpc.answer().error_message


def test_turns_wait_for_those_before_them_and_other_conversations_do_not(rpc: StreamRpc) -> None:
    rpc.ask(ask("count 20", "a1", 11, start=True), ask("second", "a2", 11))
    rpc.ask(ask("first", "b1", 12, start=True))
    rpc.half_close()
    order = [answer.infer_response.id for answer in rpc.rest()]
    assert order.index("b1") < order.index("a2")
    assert order.index("a2") > len(order) - 1 - order[::-1].index("a1")
    assert order.count("a1") == 21


def test_the_client_continues_a_conversation_after_interrupting_one_turn(rpc: StreamRpc) -> None:
    rpc.ask(ask(LONG, "a", 21, start=True), ask("enough", "b", 21))
    heard = said(rpc.answer()) + said(rpc.answer())
    assert heard == "1 2 "
    rpc.ask(stop("a"))
    while not flags(answer := rpc.answer())[0]:
        heard += said(answer)
    assert (answer.infer_response.id, flags(answer)) == ("a", (True, True))
    assert (answer.error_message, said(answer)) == ("", "")
    assert answer.infer_response.model_name == "chatting"
    assert whole(rpc) == f"3: {LONG}|{heard}|enough"


def test_an_interrupted_request_needs_no_wish_for_an_empty_final_response(rpc: StreamRpc) -> None:
    request = ask(LONG, "a")
    del request.parameters["triton_enable_empty_final_response"]
    rpc.ask(request)
    rpc.answer()
    rpc.ask(stop("a"))
    found = rpc.rest()
    assert [flags(answer) for answer in found].count((True, True)) == 1
    assert flags(found[-1]) == (True, True)


def test_a_stream_that_breaks_in_mid_turn_keeps_what_was_said(server: Serving, stub: Any) -> None:
    with noticed(server, "chatting", NOTICED_SECS, canceled=2), streaming(stub) as broken:
        broken.ask(ask(LONG, "a", 31, start=True), ask("never asked", "b", 31))
        assert [said(broken.answer()) for _ in range(3)] == ["1 ", "2 ", "3 "]
        broken.cancel()
    with streaming(stub) as rpc:
        rpc.ask(ask("where were we?", "a", 31))
        found = whole(rpc)
    assert found.startswith(f"3: {LONG}|1 2 3 ")
    assert found.endswith("|where were we?")


def test_a_turn_that_fails_takes_its_messages_back(rpc: StreamRpc) -> None:
    rpc.ask(ask("hello", "a", 41, start=True))
    whole(rpc)
    rpc.ask(ask("fail", "b", 41))
    assert said(rpc.answer()) == "well"
    assert rpc.answer().error_message == "lost for words"
    rpc.ask(ask("again", "c", 41))
    assert whole(rpc) == "3: hello|1: hello|again"


def test_two_turns_with_one_id_are_refused_while_the_first_runs(rpc: StreamRpc) -> None:
    rpc.ask(ask(LONG, "a", 51, start=True), ask("x", "a", 51))
    while not (answer := rpc.answer()).error_message:
        assert said(answer)
    assert "has a turn with the id 'a'" in answer.error_message
    assert answer.infer_response.id == "a"
    rpc.ask(stop("a"))
    while not flags(rpc.answer())[1]:
        pass
    rpc.ask(ask("x", "a", 51))
    assert whole(rpc).startswith("3: ")


def test_limits_of_a_conversation(rpc: StreamRpc) -> None:
    brief = "chatting_briefly"
    for number in range(2):
        rpc.ask(ask("x", "a", "limits", model=brief, start=number == 0))
        whole(rpc)
    rpc.ask(ask("x", "a", "limits", model=brief))
    assert "'conversation_max_turns'" in rpc.answer().error_message


@pytest.mark.own_models("the only instance")
def test_the_longest_idle_conversation_makes_room_for_another_one(rpc: StreamRpc) -> None:
    for number in range(4):
        rpc.ask(ask("x", "a", number + 1, model="chatting_briefly", start=True))
        whole(rpc)
    rpc.ask(ask("x", "a", 1, model="chatting_briefly"))
    assert "made room for another one" in rpc.answer().error_message


def test_an_idle_conversation_expires(rpc: StreamRpc) -> None:
    for start in (True, False):
        rpc.ask(ask("x", "a", "idle", model="chatting_now", start=start))
        whole(rpc)
    idle_since = time.monotonic()
    wait_until(lambda: time.monotonic() - idle_since > 2.1, "time passes")
    rpc.ask(ask("x", "a", "idle", model="chatting_now"))
    assert "was idle for 2 s" in rpc.answer().error_message


def test_many_conversations_talk_at_once(rpc: StreamRpc) -> None:
    count = 50
    for number in range(count):
        name = f"many {number}"
        rpc.ask(ask(f"I am {number}", f"{number} 1", name, start=True))
        rpc.ask(ask("who am I?", f"{number} 2", name, end=True))
    found = dict.fromkeys((f"{number} {turn}" for number in range(count) for turn in (1, 2)), "")
    rpc.half_close()
    for answer in rpc.rest():
        assert answer.error_message == ""
        found[answer.infer_response.id] += said(answer)
    for number in range(count):
        first = f"1: I am {number}"
        assert found[f"{number} 1"] == first
        assert found[f"{number} 2"] == f"3: I am {number}|{first}|who am I?"


# The official clients.


async def test_the_aio_client_talks_and_interrupts(server: Serving) -> None:
    asked: asyncio.Queue[Any] = asyncio.Queue()

    def put(said: str, **options: Any) -> None:
        inputs = [text("messages", messages(said))]
        options = {"sequence_id": 61, **options}
        asked.put_nowait({"model_name": "chatting", "inputs": inputs, **options})

    async def requests() -> AsyncIterator[Any]:
        while (found := await asked.get()) is not None:
            yield found

    async with tritonclient.grpc.aio.InferenceServerClient(server.grpc) as client:
        put(LONG, request_id="a", sequence_start=True)
        put("and now?", request_id="b")
        heard = {"a": "", "b": ""}
        async with asyncio.timeout(WAIT_SECS):
            async for result, error in client.stream_infer(requests()):
                assert error is None
                response = result.get_response()
                output = result.as_numpy("text_output")
                if output is None:
                    assert (response.id, "cancelled" in response.parameters) == ("a", True)
                    continue
                heard[response.id] += output[0].decode()
                if heard["b"].endswith("|and now?"):
                    asked.put_nowait(None)
                if heard["a"] == "1 2 3 " and response.id == "a":
                    stopping = {"model_name": "chatting", "inputs": [], "request_id": "a"}
                    asked.put_nowait({**stopping, "parameters": {"cancel": True}})
    assert heard["b"] == f"3: {LONG}|{heard['a']}|and now?"


@pytest.mark.own_models("the turns of conversations")
def test_the_documented_client_runs(server: Serving) -> None:
    command = [sys.executable, "-X", "faulthandler", CLIENT, server.grpc, "chatting"]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = client.communicate(timeout=3 * WAIT_SECS)
    except subprocess.TimeoutExpired:
        client.send_signal(signal.SIGABRT)  # it writes the stacks of its threads
        output, errors = client.communicate()
    assert client.returncode == 0, errors
    first, second = output.splitlines()
    assert first.startswith("first (cancelled): 1 ")
    heard = first.removeprefix("first (cancelled): ")
    assert second == f"second: 3: count 100000|{heard}|How far did you count?"


# Conversations over HTTP.


def generate(http: httpx.Client, said: str, stream: bool = False, **parameters: Any) -> Any:
    path = "generate_stream" if stream else "generate"
    body = {"messages": [{"role": "user", "content": said}], **parameters}
    return http.post(f"/v2/models/chatting/{path}", json=body)


def events(answer: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_a_conversation_over_http(http: httpx.Client) -> None:
    first = generate(http, "hello", stream=True, sequence_id="http", sequence_start=True)
    assert "".join(each["text_output"] for each in events(first)) == "1: hello"
    nested = {"sequence_id": "http", "sequence_end": True}
    second = generate(http, "again", stream=True, parameters=nested)
    assert "".join(each["text_output"] for each in events(second)) == "3: hello|1: hello|again"
    third = generate(http, "x", stream=True, sequence_id="http")
    assert third.status_code == 400
    assert "is not open" in third.json()["error"]


async def test_a_conversation_of_unary_requests(client: Client) -> None:
    conversation = f"unary {client.wire}"
    answers = []
    for said_now, start in (("hello", True), ("again", False)):
        inputs = [client_input(client, messages(said_now))]
        tags = {"sequence_id": conversation, "sequence_start": start}
        result = await client.call("infer", "chatting_once", inputs, **tags)
        answers += [result.as_numpy("text_output")[0].decode()]
    assert answers == ["1: hello", "3: hello|1: hello|again"]
    tags = {"sequence_id": "never begun"}
    inputs = [client_input(client, messages("x"))]
    code, message = await client.refusal("infer", "chatting_once", inputs, **tags)
    assert code == client.code("INVALID_ARGUMENT")
    assert "conversation 'never begun' of model 'chatting_once' is not open" in message


def client_input(client: Client, value: str) -> Any:
    """The messages, as an input of that client."""
    library = tritonclient.http if client.over_http else tritonclient.grpc
    found = library.InferInput("messages", [1], "BYTES")
    found.set_data_from_numpy(np.array([value], dtype=object))
    return found


def test_generate_of_a_model_with_one_response(http: httpx.Client) -> None:
    path = "/v2/models/chatting_once/generate"
    body = {"messages": messages("hello"), "sequence_id": "plain"}
    assert http.post(path, json={**body, "sequence_start": True}).json()["text_output"]
    assert http.post(path, json=body).json()["text_output"] == "3: hello|1: hello|hello"


def test_a_conversation_may_change_the_wire(http: httpx.Client, rpc: StreamRpc) -> None:
    generate(http, "hello", stream=True, sequence_id=71, sequence_start=True)
    rpc.ask(ask("again", "a", 71))
    assert whole(rpc) == "3: hello|1: hello|again"


@pytest.mark.parametrize(
    "tags",
    [
        {"sequence_id": 1.5},
        {"sequence_id": -1},
        {"sequence_id": "x" * 129},
        {"sequence_id": "x", "sequence_start": "yes"},
        {"sequence_id": "x", "sequence_end": 1},
        {"sequence_id": [1]},
    ],
    ids=str,
)
def test_bad_tags_are_refused_and_the_next_request_is_answered(
    http: httpx.Client, tags: dict[str, Any]
) -> None:
    answer = generate(http, "x", **tags)
    assert answer.status_code in (400, 500, 501)
    assert answer.json()["error"]
    good = generate(http, "x", stream=True, sequence_id="good", sequence_start=True)
    assert good.status_code == 200


# Cancelling by id.


def test_cancelling_what_does_not_run_is_an_error_with_its_id(rpc: StreamRpc) -> None:
    rpc.ask(stop("nobody"), stop("nobody", "nope"), stop(""))
    found = [rpc.answer() for _ in range(3)]
    assert [each.infer_response.id for each in found] == ["nobody", "nobody", ""]
    assert found[0].error_message == "model 'chatting' runs no request with the id 'nobody'"
    assert found[1].error_message == "Request for unknown model: 'nope' is not found"
    assert "the id is missing" in found[2].error_message
    rpc.ask(ask("hello", "a"))
    assert whole(rpc) == "1: hello"


def test_cancelling_twice(rpc: StreamRpc) -> None:
    rpc.ask(ask(LONG, "a"))
    rpc.answer()
    rpc.ask(stop("a"), stop("a"))
    found = [each for each in rpc.rest() if not said(each)]
    assert sorted(each.error_message for each in found) == [
        "",
        "model 'chatting' runs no request with the id 'a'",
    ]


def test_the_same_id_on_another_model_is_another_request(server: Serving, rpc: StreamRpc) -> None:
    rpc.ask(ask(LONG, "a"), infer_request("stuck", "a", INPUT="x"))
    rpc.answer()
    server.wait_metric(IN_FLIGHT, "stuck", 1)
    rpc.ask(stop("a"))
    while not flags(answer := rpc.answer())[0]:
        pass
    assert answer.infer_response.model_name == "chatting"
    assert server.metric(IN_FLIGHT, "stuck") == 1


def test_a_model_that_is_not_decoupled_answers_that_it_was_cancelled(rpc: StreamRpc) -> None:
    for request_id in "abc":
        rpc.ask(infer_request("stuck", request_id, INPUT="x"))
    rpc.ask(*(stop(request_id, "stuck") for request_id in "bca"))
    found = rpc.rest()
    assert [each.infer_response.id for each in found] == ["a", "b", "c"]
    assert [flags(each) for each in found] == [(True, True)] * 3


def test_a_cancelled_request_counts_as_one(server: Serving, rpc: StreamRpc) -> None:
    with noticed(server, "chatting", NOTICED_SECS):
        rpc.ask(ask(LONG, "a"))
        rpc.answer()
        rpc.ask(stop("a"))


def test_a_late_cancel_does_not_reach_the_request_of_another_client(stub: Any) -> None:
    with streaming(stub) as mine, streaming(stub) as others:
        others.ask(ask(LONG, "a"))
        others.answer()
        mine.ask(ask("hello", "a"))
        whole(mine)
        mine.ask(stop("a"))
        assert mine.answer().error_message
        assert said(others.answer())


def test_a_cancel_of_a_refused_request_does_not_reach_that_of_another_client(stub: Any) -> None:
    with streaming(stub) as mine, streaming(stub) as others:
        others.ask(ask(LONG, "a"))
        others.answer()
        mine.ask(infer_request("chatting", "a"), stop("a"))
        assert "expected" in mine.answer().error_message
        assert "runs no request with the id 'a'" in mine.answer().error_message
        assert said(others.answer())


@pytest.mark.own_models("the turns of conversations")
def test_a_turn_that_another_stream_has_under_way_can_be_cancelled_if_its_id_is_refused(
    stub: Any,
) -> None:
    with streaming(stub) as lost, streaming(stub) as mine:
        lost.ask(ask(LONG, "a", "twice", start=True))
        lost.answer()
        mine.ask(ask("again", "a", "twice"), stop("a"))
        assert "has a turn with the id 'a'" in mine.answer().error_message
        assert flags(lost.rest()[-1]) == (True, True)


def test_a_turn_of_another_stream_can_be_cancelled_after_the_refusal_of_its_id(stub: Any) -> None:
    with streaming(stub) as lost, streaming(stub) as mine:
        lost.ask(ask(LONG, "a", "again", start=True))
        lost.answer()
        mine.ask(ask("again", "a", "again"))
        assert "has a turn with the id 'a'" in mine.answer().error_message
        mine.ask(stop("a"))
        assert flags(lost.rest()[-1]) == (True, True)


def test_another_stream_can_cancel(stub: Any) -> None:
    with streaming(stub) as mine, streaming(stub) as others:
        mine.ask(ask(LONG, "a"))
        mine.answer()
        others.ask(stop("a"))
        assert flags(mine.rest()[-1]) == (True, True)


@pytest.mark.parametrize("request_id", ["a", "with/slash", "sp ace", "ünï", "a/cancel"])
@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_cancelling_over_http(
    server: Serving, http: httpx.Client, request_id: str, version: str
) -> None:
    path = f"/v2/models/chatting{version}/requests/{quote(request_id, safe='')}/cancel"
    with Connection(server.ports["http"]) as connection:
        connection.ask(
            "/v2/models/chatting/generate_stream",
            {"messages": messages(LONG), "id": request_id},
        )
        connection.head()
        assert connection.chunk()
        answer = http.post(path)
        assert (answer.status_code, answer.content) == (200, b"{}")
        last = b""
        while chunk := connection.chunk():
            last = chunk
    assert json.loads(last.strip().splitlines()[-1][6:]) == {
        "cancelled": True,
        "id": request_id,
        "model_name": "chatting",
        "model_version": "1",
    }
    again = http.post(path)
    assert again.status_code == 404
    assert again.json() == {"error": f"model 'chatting' runs no request with the id '{request_id}'"}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/nope/requests/a/cancel", 404),
        ("/v2/models/chatting/versions/9/requests/a/cancel", 404),
        ("/v2/models/chatting/versions/x/requests/a/cancel", 404),
        ("/v2/models/chatting/requests//cancel", 400),
    ],
)
def test_what_cannot_be_cancelled_over_http(http: httpx.Client, path: str, status: int) -> None:
    answer = http.post(path)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert http.get(path).status_code == 405


@pytest.mark.parametrize("endpoint", ["generate", "infer"])
def test_a_cancelled_request_without_a_conversation_is_an_error(
    server: Serving, http: httpx.Client, endpoint: str
) -> None:
    tensor = {"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    body = {"id": "a", "INPUT": "x"} if endpoint == "generate" else {"id": "a", "inputs": [tensor]}
    with Connection(server.ports["http"]) as connection:
        with accepted(server, "stuck"):
            connection.ask(f"/v2/models/stuck/{endpoint}", body)
        assert http.post("/v2/models/stuck/requests/a/cancel").status_code == 200
        answer = connection.answer()
    assert (answer.status, answer.json) == (400, {"error": "Request was cancelled"})


def test_a_unary_call_that_is_cancelled_by_its_id_says_so(
    server: Serving, http: httpx.Client, stub: Any
) -> None:
    with accepted(server, "stuck"):
        call = stub.ModelInfer.future(infer_request("stuck", "a", INPUT="x"))
    assert http.post("/v2/models/stuck/requests/a/cancel").status_code == 200
    assert (call.code(), call.details()) == (grpc.StatusCode.CANCELLED, "Request was cancelled")
