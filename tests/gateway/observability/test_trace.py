"""A trace of a request, in Triton's JSON."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from gateway.messages import InferRequest, InferResponse, Phases, Usage
from gateway.observability.request_record import Record
from gateway.observability.span_trace import SpanTrace
from gateway.observability.statistics import ModelStatistics
from gateway.observability.trace import LEVELS, TENSORS, FileTrace
from gateway.observability.traceparent import SpanIds
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor
from tests.builders import ScriptedInstance, read_all, soon, text_request
from tests.conftest import Serve


class Kept:
    """The folder of a test's traces."""

    def __init__(self) -> None:
        self.traces: list[FileTrace] = []

    def trace(self, *levels: str, number: int = 7) -> FileTrace:
        return FileTrace(number, levels or LEVELS, self.traces.append)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def stamps(objects: Iterable[dict[str, Any]]) -> list[str]:
    return [stamp["name"] for each in objects for stamp in each.get("timestamps", ())]


def tensors(objects: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["tensor"] for each in objects if "tensor" in each]


def test_a_stamp_has_the_given_time(kept: Kept) -> None:
    trace = kept.trace()
    trace.stamp("HTTP_RECV_START", 1234)
    assert trace.objects == [{"id": 7, "timestamps": [{"name": "HTTP_RECV_START", "ns": 1234}]}]


@pytest.mark.parametrize(("request_id", "shown"), [("abc", {"request_id": "abc"}), ("", {})])
def test_a_trace_says_whose_it_is(kept: Kept, request_id: str, shown: dict[str, str]) -> None:
    trace = kept.trace("TIMESTAMPS")
    trace.accepted("m", "3", InferRequest(model="m", id=request_id))
    assert trace.objects[0] == {"id": 7, "model_name": "m", "model_version": 3, **shown}
    assert stamps(trace.objects) == ["REQUEST_START", "QUEUE_START"]


def test_a_trace_is_whole_when_the_request_has_ended_and_been_sent(kept: Kept) -> None:
    trace = kept.trace()
    trace.sent()
    trace.sent()
    assert kept.traces == []
    trace.ended(5)
    assert kept.traces == [trace]
    trace.sent()
    assert kept.traces == [trace]


@pytest.mark.parametrize(
    ("levels", "has_stamps", "has_tensors"),
    [(("TIMESTAMPS",), True, False), (("TENSORS",), False, True), (LEVELS, True, True)],
)
def test_a_level_selects_stamps_and_tensors(
    kept: Kept, levels: tuple[str, ...], has_stamps: bool, has_tensors: bool
) -> None:
    trace = kept.trace(*levels)
    trace.accepted("m", "1", text_request("hi"))
    assert bool(stamps(trace.objects)) is has_stamps
    assert bool(tensors(trace.objects)) is has_tensors


@pytest.mark.parametrize(
    ("tensor", "data", "shape"),
    [
        (array_tensor("x", Datatype.FP32, np.array([[2, 1e-7]], np.float32)), "2,1e-07", "1,2"),
        (array_tensor("x", Datatype.FP16, np.array([0.5], np.float16)), "0.5", "1"),
        (array_tensor("x", Datatype.INT64, np.array([-1, 2**40])), "-1,1099511627776", "2"),
        (array_tensor("x", Datatype.BOOL, np.array([True, False])), "1,0", "2"),
        (Tensor("x", Datatype.BF16, (1,), b"\xc0\x3f"), "1.5", "1"),
        (text_tensor("x", ["a", 'b"c']), '"a","b\\"c"', "2"),
        (Tensor("x", Datatype.BYTES, (1,), (b"\xff",)), '"\ufffd"', "1"),
        (Tensor("x", Datatype.FP32, (0,), b""), "", "0"),
    ],
)  # fmt: skip
def test_a_tensor_is_shown_as_text(kept: Kept, tensor: Tensor, data: str, shape: str) -> None:
    trace = kept.trace("TENSORS")
    trace.responded(InferResponse(outputs=(tensor,)), 5, first=True)
    assert trace.objects == [
        {
            "id": 7,
            "activity": "TENSOR_BACKEND_OUTPUT",
            "tensor": {
                "name": "x",
                "data": data,
                "shape": shape,
                "dtype": tensor.datatype.value,
            },
        }
    ]


def times(trace: FileTrace) -> dict[str, int]:
    found = (stamp for each in trace.objects for stamp in each.get("timestamps", ()))
    return {stamp["name"]: stamp["ns"] for stamp in found}


def test_the_phases_of_an_execution_follow_one_another(kept: Kept) -> None:
    trace = kept.trace()
    trace.computed(100, Phases(1, 20, 3))
    assert times(trace) == {
        "COMPUTE_START": 100,
        "COMPUTE_INPUT_END": 101,
        "COMPUTE_OUTPUT_START": 121,
        "COMPUTE_END": 124,
    }


async def test_a_request_that_is_served_stamps_every_activity(serve: Serve, kept: Kept) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    trace = kept.trace()
    with model.submit(text_request("hi", id="r"), trace) as stream:
        execution = await instance.begun()
        execution.finish("ho")
        await soon(read_all(stream))
    trace.sent()
    assert kept.traces == [trace]
    assert stamps(trace.objects) == [
        "REQUEST_START",
        "QUEUE_START",
        "INFER_RESPONSE_COMPLETE",
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
        "REQUEST_END",
    ]
    assert [tensor["data"] for tensor in tensors(trace.objects)] == ['"hi"', '"ho"']
    order = ("REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_END", "REQUEST_END")
    found = times(trace)
    assert [found[name] for name in order] == sorted(found[name] for name in order)


def test_a_hit_in_the_cache_has_no_execution(kept: Kept) -> None:
    trace = kept.trace()
    record = Record(ModelStatistics(), 1, 0, lambda _: None, trace)
    record.hit(5)
    record.responded(InferResponse(final=True))
    record.ended(None)
    assert stamps(trace.objects) == ["INFER_RESPONSE_COMPLETE", "REQUEST_END"]


@pytest.mark.parametrize("cached", [None, 0, 2])
def test_a_trace_has_the_tokens_that_the_record_has_counted(cached: int | None) -> None:
    trace = SpanTrace(7, SpanIds(None), lambda _: None)
    record = Record(ModelStatistics(), 1, 0, lambda _: None, trace)
    record.started()
    record.responded(InferResponse(usage=Usage(3, 1, cached_tokens=cached)))
    record.delivered("text_output", [b"a", b"b"], [2, None])
    record.responded(InferResponse(usage=Usage(completion_tokens=4), final=True))
    record.ended(None)
    assert trace.generated is not None
    usage = trace.generated.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 7, cached)


def test_a_request_that_never_started_has_no_execution(kept: Kept) -> None:
    trace = kept.trace()
    Record(ModelStatistics(), 1, 0, lambda _: None, trace).ended(None)
    assert stamps(trace.objects) == ["REQUEST_END"]


def test_the_trace_of_a_refused_request_is_kept_at_once_and_empty(kept: Kept) -> None:
    trace = kept.trace()
    trace.stamp("A", 1)
    trace.refused()
    assert kept.traces == [trace]
    assert trace.objects == []
    trace.sent()
    assert kept.traces == [trace]


def test_the_traces_of_requests_on_its_behalf_come_first_and_belong_to_it(kept: Kept) -> None:
    trace = FileTrace(1, LEVELS, kept.traces.append, iter((2, 3)))
    trace.accepted("outer", "1", text_request(id="r"))
    inner, other = trace.child(), trace.child()
    inner.accepted("inner", "4", text_request(id="r"))
    inner.responded(InferResponse(final=True), 5, first=True)
    inner.ended(6)
    trace.responded(InferResponse(final=True), 7, first=True)
    trace.ended(8)
    trace.sent()
    assert kept.traces == []
    other.ended(9)
    assert kept.traces == [trace]
    about = [each for each in trace.objects if "model_name" in each]
    assert [(each["id"], each.get("parent_id")) for each in about] == [(2, 1), (1, None)]
    assert stamps(each for each in trace.objects if each["id"] == 2) == [
        "REQUEST_START",
        "QUEUE_START",
        "REQUEST_END",
    ]
    assert trace.objects[0] == {"id": 3, "timestamps": [{"name": "REQUEST_END", "ns": 9}]}


def test_a_child_has_the_levels_of_its_parent(kept: Kept) -> None:
    trace = FileTrace(1, (TENSORS,), kept.traces.append, iter((2,)))
    child = trace.child()
    child.accepted("inner", "1", text_request("hi"))
    assert stamps(child.objects) == []
    assert [tensor["data"] for tensor in tensors(child.objects)] == ['"hi"']
