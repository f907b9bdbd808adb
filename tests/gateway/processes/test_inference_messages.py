"""Requests, responses and errors between processes are read as they were written."""

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.dataplane import DataPlane
from gateway.errors import (
    AnsweredError,
    Code,
    InferenceError,
    Refusal,
    RefusalReason,
    RefusedError,
    RetryAdvice,
    RetryLater,
    died,
    no_instance,
)
from gateway.messages import (
    Deadline,
    EngineStamps,
    InferRequest,
    InferResponse,
    Phases,
    RequestedOutput,
    RoutedPrompt,
    SequenceTag,
    SharedRegion,
    Usage,
)
from gateway.observability.receipt import Receipt, receipt_of
from gateway.observability.trace import FileTrace
from gateway.openai_contract import OpenAiRefusal
from gateway.policy.caller import Caller, tenant_of
from gateway.processes.error_messages import read_error, write_error
from gateway.processes.inference_messages import (
    LargeData,
    read_request,
    read_response,
    write_request,
    write_response,
)
from gateway.processes.request_terms import SentTimes, TraceParent
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor
from tests.builders import LoadedModels, ScriptedInstance, read_all, soon, text_request
from tests.conftest import Serve

VALUES = [
    True,
    False,
    0,
    -(1 << 63),
    (1 << 64) - 1,
    0.5,
    math.inf,
    "",
    "é\0",
    [1, ["a"]],
    {"a": {}},
]


@pytest.mark.parametrize("value", [*VALUES, None])
def test_parameters_of_a_request(value: Any) -> None:
    found = read_request(write_request(InferRequest(model="m", parameters={"p": value})))
    assert found.parameters == {"p": value}
    assert type(found.parameters["p"]) is type(value)


def test_a_number_that_is_none() -> None:
    found = read_request(write_request(InferRequest(model="m", parameters={"p": math.nan})))
    assert math.isnan(found.parameters["p"])


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("value", [1 << 64, object(), "\ud800", nested(100_000)], ids=type)
def test_a_parameter_that_cannot_be_written_is_refused(value: Any) -> None:
    with pytest.raises(InferenceError, match="'m': the parameters of the request") as caught:
        write_request(InferRequest(model="m", parameters={"p": value}))
    assert caught.value.code is Code.INVALID_ARG


TENSORS = [
    text_tensor("text", ["", "é", "x" * 70_000]),
    Tensor("wire", Datatype.BYTES, (1,), b"\2\0\0\0hi"),
    Tensor("none", Datatype.BYTES, (0,), ()),
    array_tensor("stream", Datatype.BOOL, np.array([True])),
    array_tensor("numbers", Datatype.FP32, np.arange(6, dtype=np.float32).reshape(2, 3)),
    Tensor("half", Datatype.BF16, (2,), bytearray(b"\0\1\2\3")),
    array_tensor("scalar", Datatype.INT64, np.array(5)),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: tensor.name)
def test_tensors_of_requests_and_responses(tensor: Tensor) -> None:
    asked = read_request(write_request(InferRequest(model="m", inputs=(tensor,))))
    answered = read_response(write_response(InferResponse(outputs=(tensor,))))
    for (found,) in (asked.inputs, answered.outputs):
        assert (found.name, found.datatype, found.shape) == (
            tensor.name,
            tensor.datatype,
            tensor.shape,
        )
        assert bytes(found.raw()) == bytes(tensor.raw())
        assert isinstance(found.datatype, Datatype)
        assert isinstance(found.data, tuple) == isinstance(tensor.data, tuple)


def test_the_model_its_version_and_the_id_are_sent() -> None:
    asked = InferRequest(model="m", version="2", id="seven")
    assert read_request(write_request(asked)) == asked


def test_the_requested_outputs_are_sent_without_their_regions() -> None:
    region = SharedRegion("r", 4)
    asked = InferRequest(
        model="m", outputs=(RequestedOutput("a", 3), RequestedOutput("b", region=region))
    )
    found = read_request(write_request(asked))
    assert found.outputs == (RequestedOutput("a", 3), RequestedOutput("b"))


@pytest.mark.parametrize("correlation_id", [7, (1 << 64) - 1, "a call"])
@pytest.mark.parametrize(("start", "end"), [(True, False), (False, True), (False, False)])
def test_the_sequence_of_a_request_is_that_of_its_tenant(
    correlation_id: int | str, start: bool, end: bool
) -> None:
    tag = SequenceTag(correlation_id, start, end, "a")
    asked = InferRequest(model="m", sequence=tag, caller=Caller(tenant="a"))
    found = read_request(write_request(asked)).sequence
    assert found == tag
    assert found is not None
    assert found.key == ("a", correlation_id)


def test_the_priority_of_a_request_is_sent() -> None:
    assert read_request(write_request(InferRequest(model="m", priority=3))).priority == 3


@pytest.mark.parametrize(
    ("timeout_us", "waited_us", "left_us"),
    [
        (0, 0, 0),
        (0, 5, 0),
        (100, 0, 100),
        (100, 40, 60),
        (100, 99, 1),
        (100, 100, 1),
        (100, 1e9, 1),
    ],
)
def test_a_timeout_is_sent_as_the_time_left(timeout_us: int, waited_us: int, left_us: int) -> None:
    asked = InferRequest(model="m", timeout_us=timeout_us)
    assert read_request(write_request(asked, int(waited_us))).timeout_us == left_us


NOW_NS, THERE_NS, DAY_NS = 7 * 10**15, 5_000_000_000, 24 * 3600 * 10**9


@pytest.mark.parametrize(
    ("at_ns", "left_ns"),
    [
        (0, None),
        (NOW_NS + 1_500_000_999, 1_500_000_000),
        (NOW_NS + 999, 1000),
        (NOW_NS - 1, 1000),
        (1, 1000),
        (NOW_NS + DAY_NS, DAY_NS),
        (NOW_NS + 400 * DAY_NS, DAY_NS),
    ],
)
def test_a_deadline_is_sent_as_the_time_left(
    monkeypatch: pytest.MonkeyPatch, at_ns: int, left_ns: int | None
) -> None:
    """Clocks of processes differ; a microsecond is the least that is left."""
    asked = Deadline(at_ns, at_ns, at_ns, at_ns, 1_234_000, 5_000, asked=True)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: NOW_NS)
    payload = write_request(InferRequest(model="m", deadline=asked))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: THERE_NS)
    for received_ns in (0, 3_000_000_000):
        due = 0 if left_ns is None else (received_ns or THERE_NS) + left_ns
        found = read_request(payload, received_ns=received_ns).deadline
        assert found == Deadline(due, due, due, due, 1_234_000, 5_000, asked=True)


def test_a_request_without_a_deadline_has_none_elsewhere() -> None:
    assert read_request(write_request(InferRequest(model="m", priority=1))).deadline is None


PARENT = TraceParent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def test_the_parent_of_the_traces_of_a_request_is_sent() -> None:
    found = read_request(write_request(InferRequest(model="m", trace=PARENT))).trace
    assert found == PARENT
    assert found is not None
    assert found.child() == PARENT


def test_a_trace_with_numbers_of_its_process_stays_there() -> None:
    trace = FileTrace(1, (), lambda _: None)
    assert read_request(write_request(InferRequest(model="m", trace=trace))).trace is None


@pytest.mark.parametrize(
    "response",
    [
        InferResponse(),
        InferResponse(final=True),
        InferResponse(usage=Usage(prompt_tokens=3, completion_tokens=1, finish_reason="stop")),
        InferResponse(parameters={"event": "done", "n": 1, "x": 0.5, "b": False}, final=True),
        InferResponse(phases=Phases(input_ns=1, infer_ns=1 << 40, output_ns=3)),
        InferResponse(final=True, engine=EngineStamps(1 << 60, 2, 3, 4, 5)),
    ],
)
def test_a_response(response: InferResponse) -> None:
    assert read_response(write_response(response)) == response


@pytest.mark.parametrize("cached", [None, 0, 7])
def test_cached_tokens(cached: int | None) -> None:
    usage = Usage(prompt_tokens=9, cached_tokens=cached)
    found = read_response(write_response(InferResponse(usage=usage))).usage
    assert found is not None
    assert found.cached_tokens == cached


def test_a_prompt_of_a_router() -> None:
    asked = InferRequest(model="m", prompt=RoutedPrompt(1024, (b"12345678", b"abcdefgh")))
    assert read_request(write_request(asked)) == asked


@pytest.mark.parametrize("keys", [(b"1234567",), (b"12345678",) * 2049])
def test_a_prompt_with_foreign_keys_is_refused(keys: tuple[bytes, ...]) -> None:
    written = write_request(InferRequest(model="m", prompt=RoutedPrompt(1, keys)))
    with pytest.raises(InferenceError, match="malformed request"):
        read_request(written)


def unable() -> InferenceError:
    """The refusal of a model without an instance."""
    error = RetryLater("no instance is left", 1.0)
    error.lacks_instance = True
    return error


def behind_steps() -> InferenceError:
    """The refusal of a later step of an ensemble."""
    error = RetryLater("the second step is full")
    error.after_steps = True
    return error


ERRORS = [
    InferenceError(Code.NOT_FOUND, "gone"),
    died("it has ended", 3),
    no_instance("it is being restarted"),
    AnsweredError(Code.UNKNOWN, "the model's own"),
    RefusedError(Code.UNAVAILABLE, "full"),
    RetryLater("one is being started", 40),
    unable(),
    behind_steps(),
    Refusal(RefusalReason.DEADLINE_EXCEEDED, "late", RetryAdvice(predicted_wait_secs=2.5)),
    Refusal(RefusalReason.RATE_LIMITED, "no", RetryAdvice(retries=False, limit="tokens")),
    Refusal(RefusalReason.DEADLINE_UNREACHABLE, "busy", RetryAdvice(retry_after_secs=0.25)),
    OpenAiRefusal(Code.INVALID_ARG, "no", status=400, body=b"{}"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.message)
@pytest.mark.parametrize("final", [True, False])
def test_the_error_of_a_response_keeps_its_kind(error: InferenceError, final: bool) -> None:
    found = read_response(write_response(InferResponse(error=error, final=final)))
    assert (type(found.error), vars(found.error)) == (type(error), vars(error))
    assert found.final is final


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.message)
def test_an_error_that_ends_a_request_keeps_its_kind(error: InferenceError) -> None:
    found = read_error(write_error(error))
    assert (type(found), vars(found)) == (type(error), vars(error))


def test_a_lone_surrogate_in_the_text_of_an_error_is_replaced() -> None:
    sent = InferenceError(Code.NOT_FOUND, "no model '\ud800'")
    assert read_error(write_error(sent)).message == "no model '?'"


@pytest.mark.parametrize("code", Code)
def test_an_error(code: Code) -> None:
    found = read_error(write_error(InferenceError(code, "naïve")))
    assert (type(found), found.code, found.message) == (InferenceError, code, "naïve")


def test_a_refusal_in_openais_form() -> None:
    sent = OpenAiRefusal(Code.NOT_FOUND, "none", status=404, body=b'{"error": 1}')
    found = read_error(write_error(sent))
    assert isinstance(found, OpenAiRefusal)
    assert (found.code, found.message, found.status, found.body) == (
        Code.NOT_FOUND,
        "none",
        404,
        b'{"error": 1}',
    )


@pytest.mark.parametrize("caller", [None, Caller(tenant="a", key_id="k")])
def test_the_tenant_of_a_request_is_that_of_its_caller(caller: Caller | None) -> None:
    found = read_request(write_request(InferRequest(model="llama", caller=caller)))
    assert tenant_of(found.caller) == tenant_of(caller)
    assert (found.caller is None) is (caller is None)


def test_the_choice_of_a_router_is_sent_with_the_keys_of_a_rollout() -> None:
    keys = {"header:x-user": "a"}
    found = read_request(write_request(InferRequest(model="m", chosen=True, sticky=keys)))
    assert (found.chosen, found.sticky) == (True, keys)


def test_a_request_whose_times_are_wished_for_says_so() -> None:
    """Its engine measures them there; the receipt itself stays here."""
    receipt = Receipt(1, 1)
    found, plain = (
        read_request(write_request(InferRequest(model="m", receipt=each)))
        for each in (receipt, None)
    )
    assert (found.receipt is not None, plain.receipt) == (True, None)
    assert receipt_of(found) is None
    again = read_request(write_request(found))
    assert again.receipt is not None


async def test_a_request_of_another_process_is_served_without_a_receipt(serve: Serve) -> None:
    instance = ScriptedInstance()
    dataplane = DataPlane(LoadedModels(serve(instance)))  # type: ignore[arg-type]
    request = replace(text_request(id="a"), receipt=SentTimes())
    with dataplane.infer(request) as stream:
        (await instance.begun()).finish("done")
        assert await soon(read_all(stream)) == ["done"]
    with pytest.raises(InferenceError):
        dataplane.infer(replace(request, inputs=()))
    assert len(dataplane.receipts) == 0


def test_no_credential_of_a_caller_is_sent() -> None:
    caller = Caller(tenant="a", key_id="key-7", roles=frozenset({"admin"}))
    payload = write_request(InferRequest(model="m", caller=caller))
    assert b"key-7" not in payload
    assert b"admin" not in payload
    found = read_request(payload).caller
    assert found == Caller(tenant="a")


def numbers(size: int) -> Tensor:
    return Tensor("n", Datatype.UINT8, (size,), bytes(size))


def strings(*elements: bytes) -> Tensor:
    return Tensor("s", Datatype.BYTES, (len(elements),), elements)


@pytest.mark.parametrize(
    ("tensor", "is_large"),
    [
        (numbers(256 << 10), False),
        (numbers((256 << 10) + 1), True),
        (strings(bytes(256 << 10)), False),
        (strings(bytes(256 << 10), b"a"), True),
        (strings(*[b""] * 16_384), False),
        (strings(*[b""] * 16_385), True),
    ],
    ids=["256 KiB", "more", "256 KiB of strings", "more of them", "16384 strings", "16385 strings"],
)
def test_large_data_is_sent_apart_if_asked(tensor: Tensor, is_large: bool) -> None:
    request = InferRequest(model="m", inputs=(numbers(1), tensor))
    assert read_request(write_request(request)).inputs == request.inputs
    large: list[LargeData] = []
    payload = write_request(request, large=large)
    assert large == ([tensor.data] if is_large else [])
    head = read_request(payload, None)
    assert head.inputs == request.inputs[: 1 if is_large else 2]
    found = read_request(payload, [tensor.raw()] if is_large else [])
    assert [each.raw() for each in found.inputs] == [each.raw() for each in request.inputs]
