"""Requests that were executing when processes ended."""

from dataclasses import replace

from gateway.suspects import END_BYTES, KEPT_SECS, Suspects
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


def test_a_large_tensor_is_known_by_its_ends_and_its_size() -> None:
    suspects = Suspects()

    def large(middle: bytes, end: bytes = b"e") -> bool:
        data = bytes(END_BYTES) + middle + bytes(END_BYTES) + end
        tensor = Tensor("x", Datatype.UINT8, (len(data),), data)
        request = replace(text_request(), inputs=(tensor,))
        if not suspects.found:
            suspects.add(request, "one")
        return suspects.find(request) is not None

    assert large(b"abc")
    assert large(b"xyz")
    assert not large(b"abc", b"f")
    assert not large(b"abcd")


def test_a_process_that_ended_ten_minutes_ago_counts_no_more() -> None:
    now = [0.0]
    suspects = Suspects(lambda: now[0])
    suspects.add(text_request(), "one")
    now[0] = KEPT_SECS
    assert not suspects.add(text_request(), "two").is_refused
