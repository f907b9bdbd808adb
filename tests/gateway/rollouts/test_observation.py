"""The tap on the stream of a request: what guardrails see of it."""

import struct
from dataclasses import replace

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, Usage
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.guardrails import read_guardrails
from gateway.rollouts.observation import Arm, Observation
from gateway.tensor import Datatype, Tensor
from tests.builders import (
    FLAG,
    Notebook,
    ScriptedInstance,
    new_entry,
    read_all,
    soon,
    text_request,
    text_response,
)
from tests.conftest import Serve


def tapped(evidence: Evidence) -> Observation:
    found = evidence.tap(Arm.CANDIDATE)
    assert found is not None
    return found


def evidence_of(*names: str) -> Evidence:
    return Evidence(read_guardrails({name: {} for name in names}, "guardrails"))


async def test_the_times_tokens_and_finish_reason_of_a_request_are_kept(serve: Serve) -> None:
    instance, evidence = ScriptedInstance(), evidence_of("errors")
    model: Model = serve(instance)
    tap = tapped(evidence)
    with model.submit(text_request(received_ns=7), tap=tap) as stream:
        execution = await instance.begun()
        execution.answer(text_response("a", tokens=2))
        usage = Usage(completion_tokens=3, finish_reason="length")
        execution.answer(replace(text_response("b", final=True), usage=usage))
        assert await soon(read_all(stream)) == ["a", "b"]
    assert tap.received_ns == 7
    assert 7 < tap.admitted_ns < tap.first_ns <= tap.last_ns <= tap.ended_ns
    assert (tap.tokens, tap.finish_reason, tap.complete) == (5, "length", True)
    assert model.statistics.success.count == 1
    assert evidence.ended == [0, 1, 0]


async def test_a_refused_request_is_not_observed(serve: Serve) -> None:
    instance, evidence = ScriptedInstance(), evidence_of("errors")
    model = serve(instance)
    with pytest.raises(InferenceError, match="input"):
        model.submit(replace(text_request(), inputs=()), tap=tapped(evidence))
    evidence.judge(10**18)
    assert evidence.describe()[0]["candidate"]["requests"] == 0


def test_every_event_is_passed_on() -> None:
    notebook = Notebook()
    record = new_entry(ModelStatistics()).record
    record.completion_tokens = 1
    tap = tapped(evidence_of("errors"))
    recorder = tap.recorder(record, notebook)
    recorder.responded(FLAG)
    recorder.delivered("text_output", [b"a", b"b"], [1, None])
    recorder.taken()
    recorder.wasted(FLAG)
    recorder.ended(InferenceError(Code.CANCELLED, "gone"))
    assert notebook.lines == [
        "responded",
        "delivered a b",
        "taken",
        "wasted",
        "ended: Cancelled: gone",
    ]
    assert (tap.tokens, tap.failed, tap.complete) == (1, False, False)


def test_tokens_are_those_of_the_record_while_the_request_runs() -> None:
    record = new_entry(ModelStatistics()).record
    tap = tapped(evidence_of("long_output"))
    recorder = tap.recorder(record, Notebook())
    assert tap.tokens == 0
    record.completion_tokens = 4
    recorder.responded(text_response("a", tokens=1))
    assert tap.tokens == 4
    record.completion_tokens = 9
    recorder.delivered("text_output", [b"b"], [1])
    assert tap.tokens == 9


def floats(*values: float) -> InferResponse:
    data = struct.pack(f"<{len(values)}f", *values)
    return InferResponse(outputs=(Tensor("y", Datatype.FP32, (len(values),), data),))


def halves(data: bytes) -> InferResponse:
    return InferResponse(outputs=(Tensor("y", Datatype.BF16, (len(data) // 2,), data),))


@pytest.mark.parametrize(
    ("response", "has_content", "has_nan"),
    [
        (FLAG, False, False),
        (text_response(""), False, False),
        (text_response("a"), True, False),
        (floats(), False, False),
        (floats(1.0, 2.0), True, False),
        (floats(1.0, float("nan")), True, True),
        (floats(float("-inf")), True, True),
        (floats(*([0.0] * 70_000), float("nan")), True, True),
        (halves(b"\x80\x3f"), True, False),
        (halves(b"\xc0\x7f"), True, True),
        (halves(b"\x80\xff"), True, True),
    ],
)
def test_contents_are_read_for_the_guardrails_that_need_them(
    response: InferResponse, *, has_content: bool, has_nan: bool
) -> None:
    for names, expected in (
        (["empty", "nan"], (has_content, has_nan)),
        (["empty"], (has_content, False)),
        (["errors"], (False, False)),
    ):
        tap = tapped(evidence_of(*names))
        tap.recorder(new_entry(ModelStatistics()).record, Notebook()).responded(response)
        assert (tap.has_content, tap.has_nan) == expected


@pytest.mark.parametrize(
    ("values", "has_nan"),
    [
        ([1e308, 1e308], False),
        ([-1e308] * 30, False),
        ([1.0, float("nan")], True),
        ([float("inf"), float("-inf")], True),
    ],
)
def test_large_floats_are_numbers_though_their_sum_is_none(
    values: list[float], *, has_nan: bool
) -> None:
    data = struct.pack(f"<{len(values)}d", *values)
    tap = tapped(evidence_of("nan"))
    recorder = tap.recorder(new_entry(ModelStatistics()).record, Notebook())
    tensor = Tensor("y", Datatype.FP64, (len(values),), memoryview(data))
    recorder.responded(InferResponse(outputs=(tensor,)))
    assert tap.has_nan is has_nan


def test_texts_that_are_already_written_are_content() -> None:
    tap = tapped(evidence_of("empty"))
    recorder = tap.recorder(new_entry(ModelStatistics()).record, Notebook())
    recorder.delivered("text_output", [b""], [None])
    assert not tap.has_content
    recorder.delivered("text_output", [b"a"], [None])
    assert tap.has_content


@pytest.mark.parametrize(
    ("code", "failed"),
    [(code, code.name in ("UNKNOWN", "INTERNAL", "UNAVAILABLE")) for code in Code],
)
def test_a_failure_is_the_server_s_fault_by_its_code(code: Code, *, failed: bool) -> None:
    for as_response in (True, False):
        tap = tapped(evidence_of("errors"))
        recorder = tap.recorder(new_entry(ModelStatistics()).record, Notebook())
        error = InferenceError(code, "text")
        if as_response:
            recorder.responded(InferResponse(error=error))
        recorder.ended(None if as_response else error)
        assert tap.failed is failed
