"""Requests inside a program, by threads and by tasks, on the server's own loop and on others."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from gateway.errors import Code, InferenceError
from gateway.in_process.server import ModelHandle, Server
from tests.builders import soon
from tests.gateway.in_process.conftest import in_flight, stopped_work
from tests.serving import wait_until

ONE = np.ones(1, dtype=np.float32)
ENDLESS = {"text_input": ["again"], "n": [2_000_000_000]}
BATCH = 64


@pytest.fixture
def server(models: Path) -> Iterator[Server]:
    """With a thread of its own."""
    with Server(model_repository=models) as server:
        yield server


@pytest.fixture(params=["own loop", "other loop"])
async def async_server(models: Path, request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """On the loop of the test, or in a thread that the test's loop asks."""
    if request.param == "own loop":
        async with Server(model_repository=models) as server:
            yield server
    else:
        with Server(model_repository=models) as server:
            yield server


async def cancelled(server: Server, model: str) -> bool:
    """Whether the only request of a model was cancelled, and nothing of it is left; waits."""
    return await soon(asyncio.to_thread(_wait_cancelled, server, model))


def _wait_cancelled(server: Server, model: str) -> bool:
    wait_until(stopped_work(server, model), f"the request of {model} is cancelled")
    return True


def test_arrays_go_in_and_come_out(server: Server) -> None:
    inputs = {
        "INPUT0": np.arange(4, dtype=np.float32).reshape(1, 4),
        "INPUT1": np.ones((1, 4), dtype=np.float32),
    }
    response = server.model("add_sub").infer(inputs=inputs, request_id="7").only()
    assert response.request_id == "7"
    assert response.final
    assert response.outputs["OUTPUT0"].tolist() == [[1, 2, 3, 4]]
    assert response.outputs["OUTPUT1"].dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        response.outputs["OUTPUT1"][0, 0] = 5
    asked = server.model("add_sub").infer(inputs=inputs, outputs=["OUTPUT1"]).only()
    assert set(asked.outputs) == {"OUTPUT1"}
    twice = server.model("add_sub").infer(inputs=inputs, outputs=["OUTPUT1", "OUTPUT1"]).only()
    assert set(twice.outputs) == {"OUTPUT1"}


def test_texts_go_in_and_bytes_come_out(server: Server) -> None:
    texts = server.model("text").infer(inputs={"x": ["ä", b"\xff"]}).only()
    assert texts.outputs["y"].tolist() == ["ä".encode(), b"\xff"]


def test_bf16_is_float32_in_a_program(server: Server) -> None:
    given = np.array([1.5, -2.0, 3.14159274], dtype=np.float32)
    for inputs in (given, given.tolist(), (given.view("<u4") >> 16).astype(np.uint16)):
        found = server.model("bf16").infer(inputs={"x": inputs}).only().outputs["y"]
        assert found.dtype == np.float32
        assert found.tolist() == [1.5, -2.0, 3.140625]


def test_a_decoupled_model_is_an_iterator_of_responses(server: Server) -> None:
    inputs = {"text_input": ["hi"], "n": [150]}
    responses = list(server.model("repeat").infer(inputs=inputs))
    assert [each.outputs["text_output"][0] for each in responses] == [b"hi"] * 150
    assert [each.final for each in responses[-2:]] == [False, True]
    assert list(server.model("repeat").infer(inputs={**inputs, "n": [0]})) == []


def test_only_insists_on_one_response(server: Server) -> None:
    for count, text in ((0, "got 0"), (3, "got several")):
        with pytest.raises(InferenceError, match=f"expected a single response, {text}"):
            server.model("repeat").infer(inputs={"text_input": ["x"], "n": [count]}).only()


@pytest.mark.parametrize(
    ("name", "fields", "code", "text"),
    [
        ("absent", {}, Code.NOT_FOUND, "Request for unknown model: 'absent' is not found"),
        ("fp32", {}, Code.INVALID_ARG, "expected 1 inputs but got 0 inputs for model 'fp32'"),
        ("fp32", {"inputs": {"z": ONE}}, Code.INVALID_ARG, "missing required input"),
        ("fp32", {"inputs": {"z": [1.0]}}, Code.INVALID_ARG, "unexpected inference input 'z'"),
        ("fp32", {"inputs": {"x": np.ones(1)}}, Code.INVALID_ARG, "FP64"),
        ("fp32", {"inputs": {"x": ONE}, "outputs": ["q"]}, Code.INVALID_ARG, "output 'q'"),
        ("repeat", {"inputs": {"text_input": ["x"], "n": [-1]}}, Code.INVALID_ARG, "'n' is -1"),
        ("fp32", {"parameters": {"a": [1]}, "inputs": {"x": ONE}}, Code.INVALID_ARG, "'a' is list"),
    ],
)
async def test_a_bad_request_is_refused_and_the_next_is_served(
    server: Server, name: str, fields: dict[str, object], code: Code, text: str
) -> None:
    with pytest.raises(InferenceError) as caught:
        server.model(name).infer(**fields).only()  # type: ignore[arg-type]
    assert caught.value.code is code
    assert text in caught.value.message
    with pytest.raises(InferenceError) as again:
        await server.model(name).async_infer(**fields).only()  # type: ignore[arg-type]
    assert again.value.message == caught.value.message
    assert server.model("fp32").infer(inputs={"x": ONE}).only().outputs["y"] == [1]


def test_threads_ask_at_the_same_time_and_each_gets_its_own_answer(server: Server) -> None:
    model = server.model("fp32")

    def ask(number: int) -> float:
        given = np.full(3, number, dtype=np.float32)
        return float(model.infer(inputs={"x": given}).only().outputs["y"].sum() / 3)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(200))) == list(range(200))


def test_threads_may_share_the_responses_to_one_request(server: Server) -> None:
    responses = server.model("repeat").infer(inputs={"text_input": ["x"], "n": [2000]})
    with ThreadPoolExecutor(4) as threads:
        counts = list(threads.map(lambda _: sum(1 for _ in responses), range(4)))
    assert sum(counts) == 2000


def test_the_order_of_a_threads_calls_is_that_of_their_submission(server: Server) -> None:
    model = server.model("fp32")
    asked = [model.infer(inputs={"x": ONE * number}) for number in range(100)]
    assert [float(each.only().outputs["y"][0]) for each in asked] == list(range(100))


def test_the_end_of_a_loop_cancels_and_the_model_stops(server: Server) -> None:
    for number, _ in enumerate(server.model("repeat").infer(inputs=ENDLESS)):
        if number == 200:
            break
    wait_until(stopped_work(server, "repeat"), "the request is cancelled")


def test_closing_cancels_and_later_reads_say_so(server: Server) -> None:
    with server.model("repeat").infer(inputs=ENDLESS) as responses:
        next(responses)
    wait_until(stopped_work(server, "repeat"), "the request is cancelled")
    with pytest.raises(InferenceError) as caught:
        next(responses)
    assert caught.value.code is Code.CANCELLED
    responses.close()


def test_closing_wakes_a_thread_that_waits(server: Server) -> None:
    responses = server.model("slow").infer(inputs={"x": ONE})
    errors: list[InferenceError] = []

    def read() -> None:
        with pytest.raises(InferenceError) as caught:
            next(responses)
        errors.append(caught.value)

    reading = threading.Thread(target=read)
    reading.start()
    wait_until(lambda: in_flight(server.metrics(), "slow") == 1, "the request is in flight")
    responses.close()
    reading.join()
    assert errors[0].code is Code.CANCELLED
    wait_until(stopped_work(server, "slow"), "the request is cancelled")


def produced(model: ModelHandle) -> int:
    """The number of responses to the only request so far; the statistics count up to 256."""
    return len(model.statistics()["model_stats"][0]["response_stats"])


def test_unread_responses_block_the_model(server: Server) -> None:
    model = server.model("repeat")
    kept = model.infer(inputs=ENDLESS)
    wait_until(lambda: produced(model) >= BATCH, "the stream is full")
    for _ in range(300):
        server.model("fp32").infer(inputs={"x": ONE}).only()
    # One batch has been fetched for the reader, another waits in the stream.
    assert produced(model) <= 2 * BATCH + 1
    assert next(kept).outputs["text_output"] == [b"again"]


def test_requests_are_traced_as_those_of_other_frontends(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    tracing = {"level": "TIMESTAMPS", "rate": 1, "triton,file": file}
    with Server(model_repository=models, trace_config=tracing) as server:
        server.model("fp32").infer(inputs={"x": ONE}, request_id="7").only()
        with pytest.raises(InferenceError):
            server.model("fp32").infer().only()
    objects = json.loads(file.read_text())
    assert [each["request_id"] for each in objects if "request_id" in each] == ["7"]
    names = [stamp["name"] for each in objects for stamp in each.get("timestamps", [])]
    assert names[0] == "REQUEST_START"
    assert names[-1] == "REQUEST_END"


async def test_tasks_read_responses_from_any_loop(async_server: Server) -> None:
    response = await async_server.model("fp32").async_infer(inputs={"x": ONE}).only()
    assert response.outputs["y"] == [1]
    inputs = {"text_input": ["hi"], "n": [150]}
    responses = async_server.model("repeat").async_infer(inputs=inputs)
    assert [each.outputs["text_output"][0] async for each in responses] == [b"hi"] * 150
    with pytest.raises(InferenceError, match="expected a single response, got several"):
        await async_server.model("repeat").async_infer(inputs=inputs).only()
    assert async_server.ready()
    assert async_server.model("repeat").ready()


async def test_tasks_ask_at_the_same_time(async_server: Server) -> None:
    model = async_server.model("fp32")

    async def ask(number: int) -> float:
        response = await model.async_infer(inputs={"x": ONE * number}).only()
        return float(response.outputs["y"][0])

    assert await asyncio.gather(*map(ask, range(100))) == list(range(100))


async def test_the_end_of_an_async_loop_cancels_and_the_model_stops(async_server: Server) -> None:
    count = 0
    async for _ in async_server.model("repeat").async_infer(inputs=ENDLESS):
        count += 1
        if count == 200:
            break
    assert await cancelled(async_server, "repeat")


async def test_aclosing_cancels_and_the_work_stops(async_server: Server) -> None:
    async with aclosing(async_server.model("repeat").async_infer(inputs=ENDLESS)) as responses:
        await anext(responses)
    assert await cancelled(async_server, "repeat")
    with pytest.raises(InferenceError, match="Request was cancelled"):
        await anext(responses)


async def test_a_cancelled_task_cancels_its_request(async_server: Server) -> None:
    kept = async_server.model("slow").async_infer(inputs={"x": ONE})
    reading = asyncio.create_task(anext(kept))
    while in_flight(await async_server.async_metrics(), "slow") != 1:  # noqa: ASYNC110 - a client can only ask
        await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(reading)
    assert await cancelled(async_server, "slow")


async def test_a_second_reader_of_a_tasks_responses_is_refused(async_server: Server) -> None:
    kept = async_server.model("slow").async_infer(inputs={"x": ONE})
    reading = asyncio.create_task(anext(kept))
    await asyncio.sleep(0)
    with pytest.raises(InferenceError, match="being read by another task"):
        await anext(kept)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(reading)


async def test_a_thread_asks_a_server_that_runs_on_an_event_loop(models: Path) -> None:
    async with Server(model_repository=models) as server:
        infer = server.model("fp32").infer
        response = await soon(asyncio.to_thread(lambda: infer(inputs={"x": ONE}).only()))
        assert response.outputs["y"] == [1]
        assert "fp32" in {name for name, _ in await soon(asyncio.to_thread(server.models))}
        await soon(asyncio.to_thread(server.stop))
    assert not server.live()


@pytest.mark.parametrize("count", [0, 2])
async def test_the_last_response_has_the_receipt_of_a_request_that_asks(
    async_server: Server, count: int
) -> None:
    inputs = {"text_input": ["x"], "n": [count]}
    model = async_server.model("repeat")
    found = [
        each.timing async for each in model.async_infer(inputs=inputs, parameters={"timing": True})
    ]
    *others, last = found
    assert not any(others)
    assert last is not None
    total = last["total"]
    assert round(sum(last.values()) - total, 3) == total
    plain = [each.timing async for each in model.async_infer(inputs=inputs)]
    assert not any(plain)
