"""Comparisons of tensors, and what they say about the worst element."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.arrays import to_array
from gateway.data_files import DataFiles
from gateway.errors import InferenceError
from gateway.models.golden.data import GoldenData, read_arrays
from gateway.models.golden.tensor_checks import Mismatch, read_tensor_checks
from gateway.strict_json import StrictObject
from gateway.tensor import Datatype, array_tensor

NAN = float("nan")


def check(checks: dict[str, Any], datatype: str, array: Any, folder: Path = Path()) -> None:
    """Check an output of that datatype."""
    files = DataFiles("m", folder, "golden", "golden data")
    data = GoldenData("g", partial(read_arrays, files, "g"))
    found = read_tensor_checks(StrictObject(checks, "expect"), "y", Datatype(datatype), data)
    assert found
    for each in found:
        each(np.asarray(array))


@pytest.mark.parametrize(
    ("checks", "datatype", "array"),
    [
        ({"equals": [1, 2]}, "INT32", np.array([[1, 2]], np.int32)),
        ({"equals": [[1, 2]]}, "INT32", np.array([[1, 2]], np.int32)),
        ({"equals": [2**63 - 1]}, "INT64", np.array([2**63 - 1])),
        ({"equals": [NAN], "nan": True}, "FP32", np.array([NAN], np.float32)),
        ({"equals": []}, "FP32", np.zeros(0, np.float32)),
        ({"equals": ["cat"]}, "BYTES", np.array([[b"cat"]], object)),
        ({"equals": [True, False]}, "BOOL", np.array([True, False])),
        ({"close": [1.0, 0.0]}, "FP32", np.array([1.00009, 9e-7], np.float32)),
        ({"close": [1.0]}, "FP64", np.array([1 + 9e-10])),
        ({"close": [1.0]}, "FP16", np.array([1.015], np.float16)),
        ({"close": [NAN, 1.0], "nan": True}, "FP32", np.array([NAN, 1], np.float32)),
        ({"close": [float("inf")]}, "FP32", np.array([np.inf], np.float32)),
        ({"close": [10], "atol": 2}, "INT32", np.array([12], np.int32)),
        ({"close": [1.0], "rtol": 0.5}, "FP32", np.array([1.4], np.float32)),
        ({"cosine": [[1, 0], [0, 2]]}, "FP32", np.array([[5, 0.1], [0, 1]], np.float32)),
        ({"cosine": [1, 0], "min": 0.5}, "FP32", np.array([1, 1], np.float32)),
        ({"argmax": [1, 0]}, "FP32", np.array([[0, 2], [3, 1]], np.float32)),
        ({"top": [[2, 0]]}, "FP32", np.array([3, 1, 2], np.float32)),
    ],
)
def test_an_answer_that_is_near_enough_passes(
    checks: dict[str, Any], datatype: str, array: Any
) -> None:
    check(checks, datatype, array)


@pytest.mark.parametrize(
    ("checks", "datatype", "array", "text"),
    [
        (
            {"close": [[0.5, 0.5], [0.5, 0.5]], "rtol": 0.001},
            "FP32",
            np.array([[0.5, 0.51], [0.25, 0.5]], np.float32),
            "element [1,0] is 0.25, expected 0.5 within 1e-06 + 0.001*|expected| "
            "(2 of 4 elements differ)",
        ),
        (
            {"close": [1.0, 2.0]},
            "FP32",
            np.array([9.0, NAN], np.float32),
            "element [1] is nan, expected 2.0 within 1e-06 + 0.0001*|expected| "
            "(2 of 2 elements differ)",
        ),
        ({"close": [NAN]}, "FP32", np.array([NAN], np.float32), "element [0] is nan, expected nan"),
        ({"close": [NAN], "nan": True}, "FP32", np.array([1], np.float32), "[0] is 1.0, expected"),
        ({"close": [1.0]}, "FP32", np.array([np.inf], np.float32), "element [0] is inf"),
        ({"close": [float("inf")]}, "FP32", np.array([1], np.float32), "element [0] is 1.0"),
        ({"close": [1.0]}, "FP32", np.array([1.0002], np.float32), "1 of 1 elements"),
        ({"close": [1.0]}, "FP64", np.array([1.0001]), "1 of 1 elements"),
        ({"close": [10]}, "INT32", np.array([11], np.int32), "[0] is 11, expected 10 (1 of 1"),
        (
            {"equals": [2**63 - 1]},
            "INT64",
            np.array([2**63 - 2]),
            "element [0] is 9223372036854775806, expected 9223372036854775807",
        ),
        ({"equals": [1.0]}, "FP32", np.array([1.0000001], np.float32), "element [0] is 1.0000001"),
        ({"equals": [NAN]}, "FP32", np.array([NAN], np.float32), "element [0] is nan"),
        (
            {"equals": ["cat", "dog"]},
            "BYTES",
            np.array([b"cat", b"cow"], object),
            "element [1] is 'cow', expected 'dog' (1 of 2 elements differ)",
        ),
        ({"equals": [1, 2]}, "INT32", np.array([1], np.int32), "shape is [1], expected [2]"),
        (
            {"equals": [[1, 2]]},
            "INT32",
            np.array([1, 2], np.int32),
            "shape is [2], expected [1,2]",
        ),
        (
            {"cosine": [[1, 0], [0, 1]]},
            "FP32",
            np.array([[1, 0], [1, 1]], np.float32),
            "row 1 has the cosine 0.707107, expected at least 0.99 (1 of 2 rows differ)",
        ),
        ({"cosine": [1, 0]}, "FP32", np.array([NAN, 0], np.float32), "row 0 has the cosine -1"),
        ({"cosine": [1, 0]}, "FP32", np.zeros((2, 2), np.float32), "has 2 rows of 2 elements"),
        (
            {"argmax": [1]},
            "FP32",
            np.array([3, 2], np.float32),
            "row 0 has the classes [0], expected [1] (1 of 1 rows differ)",
        ),
        ({"argmax": [1]}, "FP32", np.array([NAN, 2], np.float32), "row 0 has the classes NaN"),
        ({"argmax": [1]}, "FP32", np.zeros((2, 2), np.float32), "has 2 rows, expected 1"),
        ({"top": [[0, 1]]}, "FP32", np.array([3, 1, 2], np.float32), "the classes [0, 2], expec"),
    ],
)
def test_an_answer_that_differs_fails_by_its_worst_element(
    checks: dict[str, Any], datatype: str, array: Any, text: str
) -> None:
    with pytest.raises(Mismatch) as caught:
        check(checks, datatype, array)
    assert text in str(caught.value)


def test_bf16_is_compared_as_the_numbers_of_its_bits() -> None:
    bits = np.array([0x3F80, 0x4000], np.uint16)
    check({"close": [1.01, 2.0]}, "BF16", to_array(array_tensor("y", Datatype.BF16, bits)))


def test_expected_arrays_may_be_in_an_npz_file_with_their_shape(tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    np.savez(tmp_path / "golden" / "g.npz", y=np.ones((1, 2), np.float32), t=np.array(["a"]))
    check({"equals": "npz:y"}, "FP32", np.ones((1, 2), np.float32), tmp_path)
    check({"equals": "npz:t"}, "BYTES", np.array([b"a"], object), tmp_path)
    with pytest.raises(Mismatch, match=r"shape is \[2\], expected \[1,2\]"):
        check({"equals": "npz:y"}, "FP32", np.ones(2, np.float32), tmp_path)
    with pytest.raises(InferenceError, match="has no such array, only 'y', 't'"):
        check({"equals": "npz:z"}, "FP32", np.ones(2, np.float32), tmp_path)
    with pytest.raises(InferenceError, match="has FP32, expected FP64"):
        check({"equals": "npz:y"}, "FP64", np.ones((1, 2)), tmp_path)


def test_an_npz_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.models.golden.data.MOST_BYTES", 2000)
    (tmp_path / "golden").mkdir()
    zeros = np.zeros(2000, np.uint8)
    np.savez_compressed(tmp_path / "golden" / "g.npz", y=zeros)
    with pytest.raises(InferenceError, match="2128 bytes of arrays, expected at most 2000"):
        check({"equals": "npz:y"}, "UINT8", zeros, tmp_path)


@pytest.mark.parametrize(
    ("at", "content", "reason"),
    [(80, bytes([255] * 100), "Error -3 while decompressing"), (6, b"\1", "is encrypted")],
    ids=["damaged", "encrypted"],
)
def test_an_npz_file_that_cannot_be_read_is_refused_by_its_name(
    tmp_path: Path, at: int, content: bytes, reason: str
) -> None:
    numbers = np.arange(5000.0)
    (tmp_path / "golden").mkdir()
    file = tmp_path / "golden" / "g.npz"
    np.savez_compressed(file, y=numbers)
    damaged = bytearray(file.read_bytes())
    damaged[at : at + len(content)] = content
    if content == b"\1":
        damaged[damaged.index(b"PK\1\2") + 8] = 1
    file.write_bytes(damaged)
    with pytest.raises(InferenceError, match=f"'g.npz' cannot be read: .*{reason}"):
        check({"equals": "npz:y"}, "FP64", numbers, tmp_path)
