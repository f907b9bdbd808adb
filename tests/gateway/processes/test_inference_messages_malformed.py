"""Malformed requests, responses and errors of other processes."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import MOST_OUTPUTS, InferRequest, InferResponse
from gateway.processes.error_messages import read_error, write_error
from gateway.processes.inference_messages import (
    MOST_DIMS,
    read_request,
    read_response,
    write_request,
    write_response,
)
from gateway.tensor import Datatype, text_tensor

encode = msgspec.msgpack.encode

REQUEST = ["m", "2", "id", [], {}, "tenant"]
TERMS = [[], None, 0, 0, None, None, False, None, False]
"""Terms without a deadline."""
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def request_with(tensor: list[Any]) -> bytes:
    return encode(["m", "2", "id", [tensor], {}, "tenant"])


def response_with(tensor: list[Any]) -> bytes:
    return encode([True, [tensor], None, None])


def numbers(shape: Any, data: Any, datatype: str = "INT16") -> list[Any]:
    return ["t", datatype, shape, data]


TENSORS: list[tuple[list[Any], str]] = [
    (["t", "INT16", [1]], "of at least length 4, got 3"),
    (numbers([1], b"ab", "INT15"), "'INT15' .*expected one of BOOL, UINT8"),
    (numbers([1], "ab"), "Expected `bytes | array`, got `str`"),
    (numbers([1], None), "Expected `int | bytes | array`, got `None`"),
    (numbers([1], 0), "'t' has large data 0, expected less than 0"),
    (numbers([1], -1), "Expected `int` >= 0 .*, got -1"),
    (numbers(1, b"ab"), "Expected `array`, got `int`"),
    (numbers([1.0], b"ab"), "Expected `int`, got `float`"),
    (numbers([True], b"ab"), "Expected `int`, got `bool`"),
    (numbers([-1], b"ab"), "Expected `int` >= 0 .*, got -1"),
    (numbers([-1, -1], b"ab"), "Expected `int` >= 0 .*, got -1"),
    (numbers([1] * (MOST_DIMS + 1), b"ab"), "of length <= 64 .*, got 65 elements"),
    (
        numbers([(1 << 64) - 1] * MOST_DIMS, b"ab"),
        "has 2 bytes, expected [0-9]{1000,} by its shape",
    ),
    (numbers([2], b"ab"), r"'t' of INT16 has 2 bytes, expected 4 by its shape \[2\]"),
    (numbers([], b"abc"), r"has 3 bytes, expected 2 by its shape \[\]"),
    (numbers([2, 0], b"ab"), r"has 2 bytes, expected 0 by its shape \[2,0\]"),
    (numbers([0, 3], b"abcd"), r"has 4 bytes, expected 0 by its shape \[0,3\]"),
    (numbers([1], [b"ab"]), "'t' of INT16 has elements of BYTES, expected bytes"),
    (numbers([1], [b"a", b"b"]), "'t' of INT16 has elements of BYTES, expected bytes"),
    (numbers([2], [b"ab"], "BYTES"), r"has 1 elements, expected 2 by its shape \[2\]"),
    (numbers([1, 1], [b"a", b"b"], "BYTES"), "has 2 elements, expected 1"),
    (numbers([1], [1], "BYTES"), "Expected `bytes`, got `int`"),
    (numbers([2], b"\1\0\0\0a", "BYTES"), "has 1 elements, expected 2"),
    (numbers([5], b"\1\0\0\0a", "BYTES"), "has 1 elements, expected 5"),
    (numbers([0, 2], b"\1\0\0\0a", "BYTES"), "has 1 elements, expected 0"),
    (numbers([1], b"\0\0\0\0" * 40, "BYTES"), "has 40 elements, expected 1"),
    (numbers([2], b"\1\0\0\0a\2\0\0\0b", "BYTES"), "10 bytes, expected 11 by .* element 1"),
    (numbers([1], b"\1\0", "BYTES"), "has 2 bytes, expected 5 by .* element 0"),
    (numbers([1], b"\0\0", "BYTES"), "has 2 bytes, expected 4 by .* element 0"),
]


@pytest.mark.parametrize(("tensor", "error"), TENSORS)
def test_a_tensor_whose_parts_do_not_fit_is_refused(tensor: list[Any], error: str) -> None:
    with pytest.raises(InferenceError, match=f"malformed request of another process: .*{error}"):
        read_request(request_with(tensor))
    with pytest.raises(InferenceError, match=f"malformed response of another process: .*{error}"):
        read_response(response_with(tensor))


def test_an_empty_batch_may_have_the_data_of_one_item_as_on_triton() -> None:
    for size in (0, 3):
        (found,) = read_request(request_with(numbers([0, 3], bytes(2 * size)))).inputs
        assert (found.shape, len(found.raw())) == ((0, 3), 2 * size)
        (found,) = read_request(request_with(numbers([0, 3], [b"a"] * size, "BYTES"))).inputs
        assert len(found.elements()) == size


def test_a_tensor_may_have_64_dims() -> None:
    (found,) = read_request(request_with(numbers([1] * MOST_DIMS, b"ab"))).inputs
    assert found.shape == (1,) * MOST_DIMS


REQUESTS: list[tuple[bytes, str]] = [
    (b"", "truncated, got 0 bytes"),
    (b"\xc1", "malformed: invalid opcode .*, got 1 bytes"),
    (encode(REQUEST) + b"x", "trailing characters .*, got 18 bytes"),
    (encode(REQUEST[:5]), "of at least length 6, got 5"),
    (encode({"model": "m"}), "Expected `array`, got `object`"),
    (encode([1, *REQUEST[1:]]), "Expected `str`, got `int`"),
    (b"\x96\xa1\xff" + encode(REQUEST)[3:], "'utf-8' codec can't decode byte 0xff"),
    (encode([*REQUEST[:4], {"p": b"b"}, ""]), "got `bytes`"),
    (encode([*REQUEST[:4], {1: 2}, ""]), "Expected `str`, got `int`"),
    (encode(REQUEST)[:-8] + b"\x81\xa1p" + b"\x91" * 100_000, "maximum recursion depth"),
    (b"\x96\xa1m\xa0\xa0\xdd\xff\xff\xff\xff", "truncated, got 10 bytes"),
    (encode([*REQUEST, [[["o", -1]]]]), "Expected `int` >= 0 .*, got -1"),
    (encode([*REQUEST, [[], [None, True, True]]]), "Expected `int | str`, got `None`"),
    (encode([*REQUEST, [[], ["s", 1, True]]]), "Expected `bool`, got `int`"),
    (encode([*REQUEST, [[], None, -1]]), "Expected `int` >= 0 .*, got -1"),
    (encode([*REQUEST, [[], None, 0, -2]]), "Expected `int` >= 0 .*, got -2"),
    (encode([*REQUEST, [[], None, 0, 0.5]]), "Expected `int`, got `float`"),
    (encode([*REQUEST, [[], None, 0, 0, PARENT + "0"]]), "matching regex .*, got '00-0af"),
    (encode([*REQUEST, [[], None, 0, 0, PARENT + "\n"]]), "matching regex .*, got '00-0af"),
    (encode([*REQUEST, [[], None, 0, 0, PARENT.upper()]]), "matching regex .*, got '00-0AF"),
    (encode([*REQUEST, [*TERMS, [-1]]]), "Expected `int` >= 0 .*, got -1"),
    (encode([*REQUEST, [*TERMS, [86_400_000_001]]]), "<= 86400000000 .*, got 86400000001"),
]


@pytest.mark.parametrize(("payload", "error"), REQUESTS)
def test_a_malformed_request_is_refused_with_what_was_found(payload: bytes, error: str) -> None:
    with pytest.raises(InferenceError, match=f"malformed request .*{error}") as caught:
        read_request(payload)
    assert caught.value.code is Code.INTERNAL
    assert len(caught.value.message) < 400


def test_a_request_may_list_1024_outputs() -> None:
    found = read_request(encode([*REQUEST, [[["o"]] * MOST_OUTPUTS]]))
    assert len(found.outputs) == MOST_OUTPUTS
    with pytest.raises(InferenceError, match="lists 1025 outputs, expected at most 1024"):
        read_request(encode([*REQUEST, [[["o"]] * (MOST_OUTPUTS + 1)]]))


RESPONSES: list[tuple[list[Any], str]] = [
    ([True, [], None], "of at least length 4, got 3"),
    ([1, [], None, None], "Expected `bool`, got `int`"),
    ([True, [], {"p": [1]}, None], "got `array`"),
    ([True, [], None, [-1, 0, ""]], "Expected `int` >= 0 .*, got -1"),
    ([True, [], None, [1, 0]], "of length 3, got 2"),
    ([True, [], None, None, [0, -5, 0]], "Expected `int` >= 0 .*, got -5"),
    ([True, [], None, None, [0, 0]], "of length 3, got 2"),
    ([True, [], None, None, None, ["Bad", ""]], "'Bad' .*expected one of Unknown, Internal"),
    ([True, [], None, None, None, ["Internal"]], "of at least length 2, got 1"),
    ([True, [], None, None, None, ["Internal", "", 600]], "Expected `int` <= 599 .*, got 600"),
]


@pytest.mark.parametrize(("fields", "error"), RESPONSES)
def test_a_malformed_response_is_refused_with_what_was_found(fields: list[Any], error: str) -> None:
    with pytest.raises(InferenceError, match=f"malformed response .*{error}") as caught:
        read_response(encode(fields))
    assert caught.value.code is Code.INTERNAL


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"", "truncated, got 0 bytes"),
        (encode(["Internal"]), "of at least length 2, got 1"),
        (encode(["Bad", ""]), "'Bad' .*expected one of Unknown, Internal"),
        (encode(["Internal", "", -1]), "Expected `int` >= 0 .*, got -1"),
    ],
)
def test_a_malformed_error_is_an_error_that_says_so(payload: bytes, error: str) -> None:
    with pytest.raises(InferenceError, match=f"malformed error .*{error}"):
        raise read_error(payload)


TENSOR = text_tensor("t", ["a", "bc"])
WRITTEN: list[tuple[bytes, Callable[[bytes], object]]] = [
    (write_request(InferRequest(model="m", inputs=(TENSOR,), parameters={"p": [1]})), read_request),
    (write_response(InferResponse(outputs=(TENSOR,), parameters={"p": 1})), read_response),
    (write_error(InferenceError(Code.NOT_FOUND, "no")), read_error),
]
DAMAGES = 2000


@pytest.mark.parametrize(("payload", "read"), WRITTEN)
def test_a_damaged_message_is_read_or_refused(
    payload: bytes, read: Callable[[bytes], object]
) -> None:
    for seed in range(DAMAGES):
        dice = random.Random(seed)
        damaged = bytearray(payload)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        del damaged[dice.randint(0, len(damaged)) :]
        try:
            read(bytes(damaged))
        except InferenceError as error:
            assert "another process" in error.message  # noqa: PT017  # most are refused


@pytest.mark.parametrize("datatype", Datatype)
def test_a_tensor_with_a_byte_too_many_is_refused(datatype: Datatype) -> None:
    with pytest.raises(InferenceError, match=r"'t' of [A-Z0-9]+ has .*, expected"):
        read_request(request_with(numbers([1], bytes(9), datatype)))
