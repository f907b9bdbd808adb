"""The helper functions of `triton_python_backend_utils` that need no request."""

import struct
from typing import Any

import numpy as np
import pytest

from backends.python.worker.sluice_worker.model_config import (
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from backends.python.worker.sluice_worker.tensor import (
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("TYPE_FP32", np.float32), ("TYPE_STRING", np.object_), ("TYPE_BOOL", bool)],
)
def test_data_types_of_a_config(name: str, expected: Any) -> None:
    assert triton_string_to_numpy(name) is expected


def test_bfloat16_has_no_numpy_type() -> None:
    with pytest.raises(KeyError):
        triton_string_to_numpy("TYPE_BF16")


def test_numbers_of_datatypes_go_both_ways() -> None:
    for number in range(1, 14):
        assert numpy_to_triton_type(triton_to_numpy_type(number)) == number
    assert [triton_to_numpy_type(number) for number in (0, 14, 99)] == [None] * 3
    assert numpy_to_triton_type(np.bytes_) == 13
    assert numpy_to_triton_type(np.complex64) is None


def test_bytes_to_the_wire_form_and_back() -> None:
    wire = serialize_byte_tensor(np.array([["a", b"bc"]], dtype=object))
    assert wire == b"\1\0\0\0a\2\0\0\0bc"
    assert deserialize_bytes_tensor(wire).tolist() == [b"a", b"bc"]
    assert serialize_byte_tensor(np.array([], dtype=object)) == ()
    assert serialize_byte_tensor(np.zeros(2)) is None


@pytest.mark.parametrize("wire", [b"\5\0\0\0a", b"\5\0"])
def test_a_wire_form_that_is_cut_short_is_refused(wire: bytes) -> None:
    with pytest.raises(struct.error):
        deserialize_bytes_tensor(wire)


def test_entries_of_a_config() -> None:
    config = {"input": [{"name": "a"}], "output": [{"name": "b"}]}
    assert get_input_config_by_name(config, "a") == {"name": "a"}
    assert get_output_config_by_name(config, "b") == {"name": "b"}
    assert get_input_config_by_name(config, "b") is None
    assert get_output_config_by_name({}, "b") is None


def test_a_config_is_decoupled_by_its_transaction_policy() -> None:
    assert not using_decoupled_model_transaction_policy({})
    policy = {"model_transaction_policy": {"decoupled": True}}
    assert using_decoupled_model_transaction_policy(policy)
