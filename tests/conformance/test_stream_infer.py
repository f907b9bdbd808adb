"""ModelStreamInfer: many requests on one RPC, their flags, their errors, and how the RPC ends."""

import asyncio
import queue
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2

from tests.conformance.clients import text
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving

pytestmark = pytest.mark.runs_on("grpcio", "frontends")

FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"
STRICT = (("triton_grpc_error", "true"),)
MANY = 200


@pytest.fixture(scope="module")
def stub(server: Serving) -> Iterator[Any]:
    with connected(server.grpc) as found:
        yield found


def repeat(request_id: str, count: int, delay_us: int = 0, empty_final: bool | None = None) -> Any:
    request = infer_request("repeat", request_id, text_input=request_id, n=count, delay_us=delay_us)
    if empty_final is not None:
        request.parameters[EMPTY_FINAL].bool_param = empty_final
    return request


def single(model: str, request_id: str, name: str = "INPUT", empty_final: bool = False) -> Any:
    request = infer_request(model, request_id, **{name: request_id})
    if empty_final:
        request.parameters[EMPTY_FINAL].bool_param = True
    return request


def ids(answers: Iterable[Any]) -> list[str]:
    return [answer.infer_response.id for answer in answers]


def flags(answers: Iterable[Any]) -> list[bool]:
    return [answer.infer_response.parameters[FINAL].bool_param for answer in answers]


def outputs(answers: Iterable[Any]) -> list[int]:
    return [len(answer.infer_response.outputs) for answer in answers]


def test_answers_say_which_is_the_last(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(repeat("a", 3))
        found = rpc.rest()
    assert ids(found) == ["a"] * 3
    assert flags(found) == [False, False, True]
    assert outputs(found) == [1, 1, 1]
    assert [answer.error_message for answer in found] == [""] * 3
    shown = found[0].infer_response
    assert (shown.model_name, shown.model_version) == ("repeat", "1")
    assert list(shown.raw_output_contents) == [b"\x01\x00\x00\x00a"]


def test_a_model_that_is_not_decoupled_answers_once_and_finally(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(single("single", "a"), single("single", "b", empty_final=True))
        found = rpc.rest()
    assert (ids(found), flags(found), outputs(found)) == (["a", "b"], [True, True], [1, 1])


@pytest.mark.parametrize("wanted", [None, False])
def test_an_empty_final_response_is_not_sent_unasked(stub: Any, wanted: bool | None) -> None:
    with streaming(stub) as rpc:
        rpc.ask(repeat("a", 0, empty_final=wanted), single("flagged", "b", "text_input"))
        found = rpc.rest()
    assert (ids(found), flags(found), outputs(found)) == (["b", "b"], [False, False], [1, 1])


def test_an_empty_final_response_is_sent_when_asked_for(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(repeat("a", 0, empty_final=True))
        found = rpc.answer()
        rpc.ask(single("flagged", "b", "text_input", empty_final=True))
        rest = rpc.rest()
    shown = found.infer_response
    # The version is the one that was asked for, as Triton 2.51 does it.
    assert (found.error_message, shown.id) == ("", "a")
    assert (shown.model_name, shown.model_version) == ("repeat", "")
    assert (len(shown.outputs), len(shown.raw_output_contents)) == (0, 0)
    assert flags([found, *rest]) == [True, False, False, True]
    assert outputs(rest) == [1, 1, 0]


def test_a_final_response_with_data_is_followed_by_no_empty_one(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(repeat("a", 2, empty_final=True))
        found = rpc.rest()
    assert (flags(found), outputs(found)) == ([False, True], [1, 1])


def test_a_decoupled_model_that_ends_without_a_flag_is_complete(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(repeat("a", 1))
        assert flags([rpc.answer()]) == [True]


def test_requests_of_decoupled_models_interleave(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(repeat("slow", 3, delay_us=400_000))
        assert ids([rpc.answer()]) == ["slow"]
        rpc.ask(repeat("fast", 3))
        found = rpc.rest()
    assert ids(found) == ["fast"] * 3 + ["slow"] * 2


def test_models_that_are_not_decoupled_answer_in_the_order_they_were_asked(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(single("slow", "1"), single("single", "2"), single("failing", "3"))
        rpc.ask(single("single", "4"), repeat("5", 1))
        found = rpc.rest()
    assert ids(found) == ["5", "1", "2", "3", "4"]
    assert [answer.error_message for answer in found] == ["", "", "", "the model says no", ""]


def test_a_refusal_waits_for_its_turn_unless_the_model_is_decoupled(stub: Any) -> None:
    # The order is the one that Triton 2.51 answers in.
    misshapen = single("single", "3")
    misshapen.inputs[0].shape[0] = 2
    reserved = single("single", "4")
    reserved.parameters["triton_x"].bool_param = True
    with streaming(stub) as rpc:
        rpc.ask(single("slow", "1"), single("nope", "2"), misshapen, reserved)
        rpc.ask(single("repeat", "decoupled"), single("single", "5"))
        found = rpc.rest()
    assert ids(found) == ["decoupled", "1", "2", "3", "4", "5"]


def test_a_request_that_is_refused_has_its_id_and_leaves_the_stream_alive(stub: Any) -> None:
    refused = [
        single("nope", "unknown model"),
        service_pb2.ModelInferRequest(model_name="single", id="no input"),
        single("single", "bad parameter"),
        single("single", "bad version"),
    ]
    refused[2].parameters["triton_x"].bool_param = True
    refused[3].model_version = "x"
    with streaming(stub) as rpc:
        for request in refused:
            rpc.ask(request)
            found = rpc.answer()
            assert found.error_message
            assert found.infer_response == service_pb2.ModelInferResponse(id=request.id)
            rpc.ask(single("single", "good"))
            assert ids([rpc.answer()]) == ["good"]
        assert rpc.rest() == []


def test_a_models_error_names_the_request_and_is_its_last_message(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(single("failing_stream", "a"))
        found = rpc.answer()
        assert found.error_message == "the model says no"
        shown = found.infer_response
        assert (shown.id, shown.model_name, shown.model_version) == ("a", "failing_stream", "")
        assert flags([found]) == [True]
        rpc.ask(single("second_error", "b", "text_input"), repeat("c", 1))
        found = sorted(rpc.rest(), key=lambda each: each.infer_response.id)
    assert ids(found) == ["b", "b", "c"]
    assert [each.error_message for each in found] == ["", "and then it broke", ""]


def test_a_crash_of_a_model_does_not_show_its_cause(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(single("crashing_stream", "a", "text_input"))
        found = rpc.rest()
    text = "model 'crashing_stream' failed unexpectedly; the server's log says why"
    assert [each.error_message for each in found] == ["", text]


@pytest.mark.parametrize(
    ("model", "name", "code", "message"),
    [
        ("failing", "INPUT", "INTERNAL", "the model says no"),
        ("failing_stream", "INPUT", "INTERNAL", "the model says no"),
        ("unavailable", "text_input", "UNAVAILABLE", "come back later"),
    ],
)
def test_in_strict_mode_a_models_error_ends_the_rpc_with_its_status(
    server: Serving, stub: Any, model: str, name: str, code: str, message: str
) -> None:
    with streaming(stub, STRICT) as rpc:
        rpc.ask(single("endless", "other"))
        server.wait_metric("gateway_requests_in_flight", "endless", 1)
        rpc.ask(single(model, "a", name))
        assert rpc.error() == (code, message)
    server.wait_metric("gateway_requests_in_flight", "endless", 0)


def test_in_strict_mode_a_refusal_is_still_a_message(stub: Any) -> None:
    with streaming(stub, STRICT) as rpc:
        rpc.ask(single("nope", "a"), single("single", "b"))
        found = rpc.rest()
    assert ids(found) == ["a", "b"]
    assert found[0].error_message == "Request for unknown model: 'nope' is not found"


@pytest.mark.parametrize("value", ["false", "True", "1", ""])
def test_strict_mode_is_only_the_value_true(stub: Any, value: str) -> None:
    with streaming(stub, (("triton_grpc_error", value),)) as rpc:
        rpc.ask(single("failing", "a"))
        assert [each.error_message for each in rpc.rest()] == ["the model says no"]


def test_after_the_half_close_every_request_is_still_answered(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(*(repeat(str(number), 2, delay_us=50_000) for number in range(10)))
        found = rpc.rest()
    assert sorted(ids(found)) == sorted([*map(str, range(10))] * 2)
    assert rpc.ended


def test_a_stream_without_requests_ends_well(stub: Any) -> None:
    with streaming(stub) as rpc:
        assert rpc.rest() == []


def test_a_cancelled_stream_cancels_all_its_requests_and_no_others(
    server: Serving, stub: Any
) -> None:
    before = server.metric("nv_inference_request_failure", "endless", reason="CANCELED")
    with streaming(stub) as bystander:
        bystander.ask(single("endless", "bystander"))
        with streaming(stub) as rpc:
            rpc.ask(*(single("endless", str(number)) for number in range(5)))
            server.wait_metric("gateway_requests_in_flight", "endless", 6)
        server.wait_metric("gateway_requests_in_flight", "endless", 1)
        assert not bystander.ended
    server.wait_metric("nv_inference_request_failure", "endless", before + 6, reason="CANCELED")


def test_many_requests_are_in_flight_on_one_stream(server: Serving, stub: Any) -> None:
    with streaming(stub) as rpc:
        # The first of them must not end before the last has begun.
        rpc.ask(*(repeat(str(number), 3, delay_us=1_000_000) for number in range(MANY)))
        server.wait_metric("gateway_requests_in_flight", "repeat", MANY)
        found = rpc.rest()
    assert len(found) == 3 * MANY
    of_each: dict[str, list[bool]] = {}
    for request_id, flag in zip(ids(found), flags(found), strict=True):
        of_each.setdefault(request_id, []).append(flag)
    assert of_each == {str(number): [False, False, True] for number in range(MANY)}


def test_a_reader_that_pauses_gets_everything_in_order(stub: Any) -> None:
    with streaming(stub) as rpc:
        rpc.ask(repeat("x" * 10_000, 2000))
        found = [rpc.answer()]
        rpc.ask(repeat("other", 1))
        found += rpc.rest()
    assert [each.error_message for each in found if each.error_message] == []
    of_first = [each for each in found if each.infer_response.id != "other"]
    assert flags(of_first) == [False] * 1999 + [True]
    assert len(found) == 2001


class Callback:
    """Collects what the official client calls back with."""

    def __init__(self) -> None:
        self._found: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any, error: Any) -> None:
        self._found.put((result, error))

    def next(self) -> tuple[Any, Any]:
        return self._found.get(timeout=WAIT_SECS)

    def until_final(self) -> list[str]:
        shown = []
        while True:
            result, error = self.next()
            assert error is None
            response = result.get_response()
            shown += [value.decode() for output in response.outputs for value in of(result, output)]
            if response.parameters[FINAL].bool_param:
                return shown


def of(result: Any, output: Any) -> list[bytes]:
    return list(result.as_numpy(output.name))


@contextmanager
def official(server: Serving, **options: Any) -> Iterator[tuple[Any, Callback]]:
    callback = Callback()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback, stream_timeout=2 * WAIT_SECS, **options)
        yield client, callback
        client.stop_stream(cancel_requests=True)


def repeat_inputs(value: str, count: int) -> list[Any]:
    number = tritonclient.grpc.InferInput("n", [1], "INT32")
    number.set_data_from_numpy(np.array([count], dtype=np.int32))
    return [text("text_input", value), number]


def test_the_official_client_sees_the_end_by_the_empty_final_response(server: Serving) -> None:
    with official(server) as (client, callback):
        for count in (3, 0, 1):
            client.async_stream_infer(
                "repeat", repeat_inputs("x", count), enable_empty_final_response=True
            )
            assert callback.until_final() == ["x"] * count


def test_the_official_client_gets_errors_and_continues_its_stream(server: Serving) -> None:
    with official(server) as (client, callback):
        client.async_stream_infer("failing", [text("INPUT", "x")], request_id="a")
        result, error = callback.next()
        assert error.message() == "the model says no"
        client.async_stream_infer("single", [text("INPUT", "x")], request_id="b")
        result, error = callback.next()
        assert (error, result.get_response().id) == (None, "b")


def test_the_official_client_in_strict_mode_learns_the_code(server: Serving) -> None:
    with official(server, headers={"triton_grpc_error": "true"}) as (client, callback):
        client.async_stream_infer("failing", [text("INPUT", "x")])
        _, error = callback.next()
        assert (error.status(), error.message()) == ("StatusCode.INTERNAL", "the model says no")


def test_stop_stream_waits_for_what_is_in_flight(server: Serving) -> None:
    callback = Callback()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback)
        client.async_stream_infer("slow", [text("INPUT", "x")])
        client.stop_stream()
        result, error = callback.next()
        assert error is None
        assert list(result.as_numpy("OUTPUT")) == [b"x"]


async def asking(*inputs: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    for each in inputs:
        yield each


async def test_the_official_aio_client_streams(server: Serving) -> None:
    async with tritonclient.grpc.aio.InferenceServerClient(server.grpc) as client:
        requests = asking(
            {"model_name": "repeat", "inputs": repeat_inputs("x", 3), "request_id": "a"},
            {"model_name": "failing", "inputs": [text("INPUT", "x")], "request_id": "b"},
            {"model_name": "single", "inputs": [text("INPUT", "x")], "request_id": "c"},
        )
        found = [each async for each in client.stream_infer(requests, stream_timeout=WAIT_SECS)]
    texts = [result.get_response().id for result, error in found if error is None]
    assert sorted(texts) == ["a", "a", "a", "c"]
    assert [error.message() for _, error in found if error] == ["the model says no"]


async def test_the_official_aio_client_may_cancel(server: Serving) -> None:
    async def forever() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "repeat", "inputs": repeat_inputs("x", 1)}
        yield {"model_name": "endless", "inputs": [text("INPUT", "x")]}
        await asyncio.Event().wait()

    async with tritonclient.grpc.aio.InferenceServerClient(server.grpc) as client:
        answers = client.stream_infer(forever(), stream_timeout=WAIT_SECS)
        _, error = await anext(answers)
        assert error is None
        await asyncio.to_thread(server.wait_metric, "gateway_requests_in_flight", "endless", 1)
        assert answers.cancel()
        await asyncio.to_thread(server.wait_metric, "gateway_requests_in_flight", "endless", 0)


def test_different_models_and_versions_share_a_stream(stub: Any) -> None:
    request = service_pb2.ModelInferRequest(model_name="versioned", id="v", model_version="1")
    request.inputs.add(name="INPUT", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    with streaming(stub) as rpc:
        rpc.ask(request, single("single", "s"), repeat("r", 1))
        found = {each.infer_response.id: each.infer_response for each in rpc.rest()}
    versions = {key: (each.model_name, each.model_version) for key, each in found.items()}
    assert versions == {"v": ("versioned", "1"), "s": ("single", "1"), "r": ("repeat", "1")}
