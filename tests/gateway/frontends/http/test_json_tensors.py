"""Elements of tensors as JSON values (protocol: JSON data rules)."""

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.http.json_tensors import (
    MAX_DEPTH,
    all_finite,
    flatten,
    is_large,
    pack,
    values_of,
    written,
    written_string,
)
from gateway.openai_contract import RequestBody
from gateway.tensor import NUMPY_TYPES, Datatype, Tensor, array_tensor, text_tensor

INTEGERS = [each for each in Datatype if each.startswith(("INT", "UINT"))]
SIGNED = [each for each in INTEGERS if each.startswith("I")]
UNSIGNED = [each for each in INTEGERS if each.startswith("U")]
FLOATS = [Datatype.FP32, Datatype.FP64]


def refusal(datatype: Datatype, values: list[Any]) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        pack(datatype, values, "X")
    return caught.value.code, caught.value.message


@pytest.mark.parametrize("datatype", [*INTEGERS, *FLOATS])
def test_numbers_become_the_bytes_of_the_datatype(datatype: Datatype) -> None:
    values = [0, 1, 127]
    assert pack(datatype, values, "X") == np.array(values, NUMPY_TYPES[datatype]).tobytes()


@pytest.mark.parametrize("datatype", [*INTEGERS, *FLOATS, Datatype.BOOL, Datatype.BYTES])
def test_nothing_is_nothing(datatype: Datatype) -> None:
    assert len(pack(datatype, [], "X")) == 0


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_are_stored_modulo_their_range(datatype: Datatype) -> None:
    low, high = (-(2**63), 2**63 - 1) if datatype in SIGNED else (0, 2**64 - 1)
    values = [low, high, 2**40 + 300, 5]
    kind = np.int64 if datatype in SIGNED else np.uint64
    expected = np.array(values, kind).astype(NUMPY_TYPES[datatype])
    assert pack(datatype, values, "X") == expected.tobytes()


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        *((each, value) for each in SIGNED for value in (1.0, True, "1", None, 2**63, {}, [])),
        *((each, value) for each in UNSIGNED for value in (1.0, False, "1", -1, 2.0**64)),
    ],
)
def test_an_integer_is_an_integer_of_64_bits(datatype: Datatype, value: Any) -> None:
    kind = "signed" if datatype in SIGNED else "unsigned"
    assert refusal(datatype, [1, value]) == (
        Code.INTERNAL,
        f"Unable to parse 'data': attempt to access JSON non-{kind}-integer as {kind}-integer",
    )


@pytest.mark.parametrize("datatype", FLOATS)
def test_a_float_is_any_number(datatype: Datatype) -> None:
    values = [0.1, 3, 2**64 - 1, math.inf, -math.inf, math.nan]
    found = np.frombuffer(pack(datatype, values, "X"), NUMPY_TYPES[datatype])
    expected = np.array(values, np.float64).astype(NUMPY_TYPES[datatype])
    np.testing.assert_array_equal(found, expected)


def test_a_double_beyond_fp32_is_infinite() -> None:
    assert np.isinf(np.frombuffer(pack(Datatype.FP32, [1e300], "X"), np.float32)).all()


@pytest.mark.parametrize("datatype", FLOATS)
@pytest.mark.parametrize("value", ["1", True, None, [1.0]])
def test_a_float_is_nothing_but_a_number(datatype: Datatype, value: Any) -> None:
    assert refusal(datatype, [1.5, value]) == (
        Code.INTERNAL,
        "Unable to parse 'data': attempt to access JSON non-number as double",
    )


def test_booleans_are_true_and_false_only() -> None:
    assert pack(Datatype.BOOL, [True, False], "X") == b"\1\0"
    assert refusal(Datatype.BOOL, [1]) == (
        Code.INTERNAL,
        "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
    )


def test_bytes_are_strings_only() -> None:
    assert pack(Datatype.BYTES, ["a", "é", ""], "X") == (b"a", "é".encode(), b"")
    assert refusal(Datatype.BYTES, ["a", 1]) == (
        Code.INTERNAL,
        "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
    )


@pytest.mark.parametrize("datatype", [Datatype.FP16, Datatype.BF16])
def test_half_precision_comes_and_goes_as_binary_only(datatype: Datatype) -> None:
    assert refusal(datatype, [1.0]) == (
        Code.INVALID_ARG,
        f"receiving {datatype} data via JSON is not supported. Please use the binary data format "
        "for input X",
    )
    with pytest.raises(InferenceError) as caught:
        values_of(Tensor("Y", datatype, (1,), b"\0\0"))
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"sending {datatype} data via JSON is not supported. Please use the binary data format "
        "for output",
    )


# Nesting.


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        ([], []),
        ([1, 2], [1, 2]),
        ([[1, 2], [3, 4]], [1, 2, 3, 4]),
        ([1, [2, [3]], [], 4], [1, 2, 3, 4]),
        ([[[]], []], []),
        ([{"a": 1}, [None]], [{"a": 1}, None]),
    ],
)
def test_nesting_is_flattened_in_order(nested: list[Any], flat: list[Any]) -> None:
    assert flatten(nested) == flat


def test_nesting_has_a_limit() -> None:
    assert MAX_DEPTH == 100
    nested: list[Any] = [1]
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    assert flatten(nested) == [1]
    with pytest.raises(InferenceError) as caught:
        flatten([nested])
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        "Unable to parse 'data': JSON nesting depth exceeds maximum allowed limit (100)",
    )


def test_values_next_to_deep_nesting_are_not_moved_at_each_level() -> None:
    nested: list[Any] = [1]
    for _ in range(MAX_DEPTH - 3):
        nested = [0, nested]
    began = time.process_time()
    assert sum(flatten([*itertools.repeat(0, 1_000_000), [*itertools.repeat(0, 9), nested]])) == 1
    assert time.process_time() - began < 5.0


# Back to JSON.


@pytest.mark.parametrize("datatype", [*INTEGERS, *FLOATS, Datatype.BOOL])
def test_values_are_returned_flat_in_their_own_kind(datatype: Datatype) -> None:
    array = np.array([[0, 1], [1, 0]], NUMPY_TYPES[datatype])
    found = values_of(array_tensor("Y", datatype, array))
    kind = bool if datatype is Datatype.BOOL else float if datatype in FLOATS else int
    assert found == [0, 1, 1, 0]
    assert {type(each) for each in found} == {kind}


@pytest.mark.parametrize("data", [b"\xcd\xcc\xcc\x3d", bytearray(b"\xcd\xcc\xcc\x3d")])
def test_an_fp32_is_the_exact_double(data: bytes | bytearray) -> None:
    assert values_of(Tensor("Y", Datatype.FP32, (1,), data)) == [0.10000000149011612]


def test_a_view_of_an_array_is_data_like_any_other() -> None:
    view = memoryview(np.array([1.5, 2.5], "<f4"))
    assert values_of(Tensor("Y", Datatype.FP32, (2,), view)) == [1.5, 2.5]


def test_bytes_become_text() -> None:
    assert values_of(text_tensor("Y", ["a", "é"])) == ["a", "é"]
    assert values_of(Tensor("Y", Datatype.BYTES, (1,), (b"\xff",))) == ["\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([], True),
        ([1.0, 2.0], True),
        ([1e308, 1e308], True),
        ([math.nan], False),
        ([math.inf, -math.inf], False),
        ([1, 2], True),
        (["nan"], True),
        ([True], True),
    ],
)
def test_only_floats_can_be_infinite(values: list[Any], finite: bool) -> None:
    assert all_finite(values) is finite


def test_an_openai_body_of_an_output_counts_by_its_text() -> None:
    large = Tensor("o", Datatype.BYTES, (1,), RequestBody(b"x" * 200_000))
    assert is_large((large,))
    assert not is_large((replace(large, data=RequestBody(b"x")),))


@pytest.mark.parametrize("text", ['ä:€\N{GRINNING FACE}"\\\n'.encode(), b"\xf0\x9f", b"x"])
@pytest.mark.parametrize("size", [1 << 18, (1 << 19) + 1])
def test_a_large_string_in_parts_is_the_same_json(text: bytes, size: int) -> None:
    element = (text * size)[:size]
    whole = orjson.dumps(element.decode("utf-8", "replace"))
    assert written_string(element) == whole
    both = Tensor("o", Datatype.BYTES, (2,), (element, b"short"))
    assert orjson.dumps(written(both)) == b'[%b,"short"]' % whole
