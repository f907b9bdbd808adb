"""Comparison of two answers to the same request."""

import struct
import time
from collections.abc import Callable

import pytest

from gateway.messages import InferResponse
from gateway.openai_contract import RESPONSE
from gateway.rollouts.comparison import MOST_BYTES, KeptAnswer
from gateway.tensor import Datatype, Tensor, join_elements
from tests.builders import text_response


def answer(*responses: InferResponse) -> KeptAnswer:
    made = KeptAnswer()
    for each in responses:
        made.add(each)
    return made


def tensor(datatype: Datatype, data: bytes | tuple[bytes, ...], name: str = "y") -> InferResponse:
    shape = (len(data),) if isinstance(data, tuple) else (len(data) // 2,)
    return InferResponse(outputs=(Tensor(name, datatype, shape, data),))


def floats(*values: float) -> InferResponse:
    data = struct.pack(f"<{len(values)}f", *values)
    return InferResponse(outputs=(Tensor("y", Datatype.FP32, (len(values),), data),))


def event(text: str, made: str) -> InferResponse:
    found = f'{{"id": "{made}", "choices": [{{"index": 0, "delta": {{"content": "{text}"}}}}]}}'
    return InferResponse(outputs=(Tensor(RESPONSE, Datatype.BYTES, (1,), (found.encode(),)),))


def raw_texts(data: bytes) -> InferResponse:
    return InferResponse(outputs=(Tensor("y", Datatype.BYTES, (2,), data),))


def deep(text: str) -> InferResponse:
    """An answer of OpenAI's with a text in many lists."""
    found = f'{{"text": {"[" * 1000}"{text}"{"]" * 1000}}}'
    return InferResponse(outputs=(Tensor(RESPONSE, Datatype.BYTES, (1,), (found.encode(),)),))


ONE, OTHER = b"\x80\x3f\x00\x40", b"\x81\x3f\x00\x40"
"""1 and 2 of BF16, and a value within its tolerance of 1."""


@pytest.mark.parametrize(
    ("stable", "copied", "differ"),
    [
        ([text_response("ab"), text_response("c")], [text_response("a"), text_response("bc")], 0),
        ([text_response("abc")], [text_response("abd")], 1),
        ([text_response("abc")], [], 1),
        ([event("ab", "1"), event("c", "1")], [event("a", "2"), event("bc", "2")], 0),
        ([event("abc", "1")], [event("abd", "1")], 1),
        ([floats(1.0, 2.0)], [floats(1.00005, 2.0)], 0),
        ([floats(1.0, 2.0)], [floats(1.001, 2.0)], 1),
        ([floats(1.0, float("nan"))], [floats(1.0, float("nan"))], 0),
        ([floats(1.0)], [floats(1.0, 2.0)], 1),
        ([tensor(Datatype.BF16, ONE)], [tensor(Datatype.BF16, OTHER)], 0),
        ([tensor(Datatype.BF16, ONE)], [tensor(Datatype.BF16, ONE[::-1])], 1),
        ([tensor(Datatype.INT16, b"\1\0")], [tensor(Datatype.INT16, b"\2\0")], 1),
        ([tensor(Datatype.INT16, b"\1\0")], [tensor(Datatype.UINT16, b"\1\0")], 1),
        ([tensor(Datatype.INT16, b"\1\0")], [tensor(Datatype.INT16, b"\1\0", "z")], 1),
        ([tensor(Datatype.BYTES, (b"a", b"bc"))], [tensor(Datatype.BYTES, (b"ab", b"c"))], 1),
        ([tensor(Datatype.BYTES, (b"a", b"b"))], [tensor(Datatype.BYTES, (b"a", b"b"))], 0),
        ([tensor(Datatype.BYTES, (b"a", b"b"))], [raw_texts(join_elements((b"a", b"b")))], 0),
        ([tensor(Datatype.BYTES, (b"a", b"b"))], [raw_texts(b"\1\0\0\0a\2\0\0\0b")], 1),
        ([deep("a")], [deep("a")], 0),
        ([deep("a")], [deep("b")], 1),
    ],
)
def test_answers_differ_by_their_contents(
    stable: list[InferResponse], copied: list[InferResponse], differ: int
) -> None:
    assert answer(*stable).differs(answer(*copied)) is bool(differ)


def test_a_large_answer_is_not_compared() -> None:
    half = text_response("x" * (MOST_BYTES // 2))
    large = answer(half, half, text_response("x"))
    assert large.differs(answer()) is None
    assert answer().differs(large) is None


def test_views_are_compared_as_fast_as_bytes() -> None:
    views = [memoryview(bytes(2 << 20)) for _ in range(2)]
    one, other = (
        answer(InferResponse(outputs=(Tensor("y", Datatype.UINT8, (2 << 20,), view),)))
        for view in views
    )

    def least(compare: Callable[[], object], wanted: bool) -> float:
        """The least processor time of some comparisons."""
        found = []
        for _ in range(5):
            began = time.thread_time()
            assert compare() is wanted
            found.append(time.thread_time() - began)
        return min(found)

    of_views = least(lambda: views[0] == views[1], True)
    assert least(lambda: one.differs(other), False) < of_views / 3


def test_memory_of_another_process_is_copied() -> None:
    data = bytearray(b"\1\0")
    outputs = (Tensor("y", Datatype.INT16, (1,), memoryview(data)),)
    kept = answer(InferResponse(outputs=outputs, shared_bytes=2))
    data[0] = 9
    assert kept.differs(answer(tensor(Datatype.INT16, b"\1\0"))) is False
