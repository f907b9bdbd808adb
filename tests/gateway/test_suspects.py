"""Requests that were executing when processes ended."""

from dataclasses import replace

import pytest

from gateway import suspects as module
from gateway.messages import InferRequest
from gateway.policy.caller import Caller
from gateway.suspects import KEPT_SECS, SAMPLE_BYTES, SAMPLES, Suspects
from gateway.tensor import Datatype, Tensor
from tests.builders import text_request


def test_many_requests_of_one_content_at_one_process_count_once() -> None:
    suspects = Suspects()
    for _ in range(9):
        found = suspects.add(text_request(), "one")
    assert not found.is_refused
    assert suspects.add(text_request(), "two").is_refused


def test_both_forms_of_a_text_have_one_content() -> None:
    suspects = Suspects()
    request = text_request("ä")
    (tensor,) = request.inputs
    suspects.add(request, "one")
    assert suspects.find(replace(request, inputs=(replace(tensor, data=tensor.raw()),)))


LARGE = SAMPLES * SAMPLE_BYTES


def of_bytes(data: bytes) -> InferRequest:
    return replace(text_request(), inputs=(Tensor("x", Datatype.UINT8, (len(data),), data),))


@pytest.mark.parametrize(
    ("size", "start", "changed"),
    [
        (LARGE, LARGE // 2 + 7, 1),
        (4 * LARGE, 4 * LARGE - 1, 1),
        (4 * LARGE, LARGE, 4 * SAMPLE_BYTES),
        (4 * LARGE, 2 * LARGE + 99, 4 * SAMPLE_BYTES),
    ],
    ids=["a-byte", "the-last-byte", "a-stripe", "another-stripe"],
)
def test_tensors_that_differ_in_their_middle_are_different(
    size: int, start: int, changed: int
) -> None:
    suspects = Suspects()
    suspects.add(of_bytes(bytes(size)), "one")
    data = bytearray(size)
    data[start : start + changed] = b"x" * changed
    assert suspects.find(of_bytes(bytes(data))) is None
    assert suspects.find(of_bytes(bytes(size + 1))) is None
    assert suspects.find(of_bytes(bytes(size))) is not None


def test_a_request_of_another_tenant_is_no_suspect() -> None:
    suspects = Suspects()
    suspects.add(replace(text_request(), caller=Caller(tenant="one")), "a")
    assert suspects.find(replace(text_request(), caller=Caller(tenant="other"))) is None
    assert suspects.find(replace(text_request(), caller=Caller(tenant="one"))) is not None


@pytest.mark.parametrize("removed_by", ["answer", "time", "number"])
def test_only_a_request_with_the_size_of_a_suspect_is_hashed(
    removed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    suspects = Suspects(lambda: now[0])
    suspects.add(text_request("gone"), "one")
    monkeypatch.setattr(module, "MOST", 1)
    if removed_by == "answer":
        suspects.clear(text_request("gone"))
    elif removed_by == "time":
        now[0] = KEPT_SECS
    suspects.add(text_request("another"), "one")
    monkeypatch.delattr(module, "fingerprint")
    assert suspects.find(text_request("gone")) is None


def test_many_suspects_of_one_loss_end_no_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    suspects = Suspects()
    for process in ("one", "two"):
        suspects.add(text_request("bad"), process)
    for number in range(9):
        suspects.add(text_request(str(number)), "three")
    assert len(suspects.found) == 3
    assert suspects.find(text_request("bad"))
    assert suspects.find(text_request("8"))
    for number in range(7, 9):
        suspects.add(text_request(str(number)), "four")
    assert suspects.add(text_request("new"), "four").key in suspects.found
    assert suspects.find(text_request("bad")) is None


def test_a_process_that_ended_ten_minutes_ago_counts_no_more() -> None:
    now = [0.0]
    suspects = Suspects(lambda: now[0])
    suspects.add(text_request(), "one")
    now[0] = KEPT_SECS
    assert not suspects.add(text_request(), "two").is_refused
