"""Requests against a config; every text is Triton's."""

import math
from dataclasses import replace

import pytest

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, RequestedOutput
from gateway.models.request_validation import RequestRules, fits
from gateway.tensor import SIZES, Datatype, Tensor

UNKNOWN = "[request id: <id_unknown>] "
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)


def declared(
    name: str, data_type: DataType = DataType.TYPE_FP32, dims: tuple[int, ...] = (16,)
) -> ModelInput:
    return ModelInput(name=name, data_type=data_type, dims=dims)


def optional(name: str) -> ModelInput:
    return replace(declared(name), optional=True)


def given(
    name: str,
    shape: tuple[int, ...] = (16,),
    datatype: Datatype = Datatype.FP32,
    data: bytes | tuple[bytes, ...] | None = None,
) -> Tensor:
    """A tensor with as many bytes as its shape needs by default."""
    if data is None:
        data = b"\0" * (max(0, math.prod(shape)) * SIZES[datatype])
    return Tensor(name, datatype, shape, data)


def model(*inputs: ModelInput, max_batch_size: int = 0) -> ModelConfig:
    output = ModelOutput(name="Y", data_type=DataType.TYPE_FP32, dims=(16,))
    return ModelConfig(
        name="m", max_batch_size=max_batch_size, input=inputs or (declared("X"),), output=(output,)
    )


BATCHED = model(max_batch_size=8)
ONE = model()
WITH_OPTIONAL = model(declared("A"), optional("B"), optional("C"), optional("D"))
TEXTS = model(declared("X", DataType.TYPE_STRING, (3,)))
TEXT_BATCHES = replace(TEXTS, max_batch_size=8)


def check(config: ModelConfig, *inputs: Tensor, **fields: object) -> int:
    return RequestRules(config).check(InferRequest(model="m", inputs=inputs, **fields))  # type: ignore[arg-type]


def refusal(config: ModelConfig, *inputs: Tensor, **fields: object) -> str:
    with pytest.raises(InferenceError) as caught:
        check(config, *inputs, **fields)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


# What fits.


@pytest.mark.parametrize(
    ("config", "inputs", "batch_size"),
    [
        (ONE, [given("X")], 1),
        (model(declared("X", dims=())), [given("X", ())], 1),
        (model(declared("X", dims=(-1, 4))), [given("X", (0, 4))], 1),
        (model(declared("X", dims=(-1, 4))), [given("X", (7, 4))], 1),
        (BATCHED, [given("X", (1, 16))], 1),
        (BATCHED, [given("X", (8, 16))], 8),
        (
            model(declared("A"), declared("B"), max_batch_size=2),
            [given("B", (2, 16)), given("A", (2, 16))],
            2,
        ),
        (WITH_OPTIONAL, [given("A")], 1),
        (WITH_OPTIONAL, [given("D"), given("A")], 1),
        (model(optional("A")), [], 1),
        (TEXTS, [given("X", (3,), Datatype.BYTES, (b"", b"a", b"bc"))], 1),
        (TEXTS, [given("X", (3,), Datatype.BYTES, b"\0" * 12)], 1),
        (TEXT_BATCHES, [given("X", (2, 3), Datatype.BYTES, (b"",) * 6)], 2),
        (
            model(declared("X", DataType.TYPE_BF16)),
            [given("X", datatype=Datatype.BF16)],
            1,
        ),
    ],
)
def test_a_request_that_fits_has_a_batch_size(
    config: ModelConfig, inputs: list[Tensor], batch_size: int
) -> None:
    assert check(config, *inputs) == batch_size


@pytest.mark.parametrize(
    ("shape", "expected", "fit"),
    [
        ((1, 16), (-1, 16), True),
        ((0, 16), (-1, 16), True),
        ((16,), (-1, 16), False),
        ((1, 8), (-1, 16), False),
        ((1, 16, 1), (-1, 16), False),
        ((), (), True),
        ((1,), (), False),
    ],
)
def test_a_shape_fits_by_rank_and_fixed_dims(
    shape: tuple[int, ...], expected: tuple[int, ...], fit: bool
) -> None:
    assert fits(shape, expected) is fit


# Inputs and outputs (protocol 22.2).


def test_a_missing_input_is_named() -> None:
    assert refusal(model(declared("A"), declared("B")), given("A")) == UNKNOWN + (
        "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['A'], but missing "
        "required input(s) ['B']. Please provide all required input(s)."
    )


def test_lists_of_names_have_no_blanks() -> None:
    config = model(*(declared(name) for name in "ABCD"))
    assert refusal(config, given("C"), given("A")) == UNKNOWN + (
        "expected 4 inputs but got 2 inputs for model 'm'. Got input(s) ['C','A'], but missing "
        "required input(s) ['B','D']. Please provide all required input(s)."
    )


def test_a_missing_input_of_several_optional_ones_gives_the_range() -> None:
    assert refusal(WITH_OPTIONAL) == UNKNOWN + (
        "expected number of inputs between 1 and 4 but got 0 inputs for model 'm'. Got input(s) "
        "[], but missing required input(s) ['A']. Please provide all required input(s)."
    )


def test_an_optional_input_does_not_stand_in_for_a_required_one() -> None:
    assert refusal(WITH_OPTIONAL, given("B")) == UNKNOWN + (
        "expected number of inputs between 1 and 4 but got 1 inputs for model 'm'. Got input(s) "
        "['B'], but missing required input(s) ['A']. Please provide all required input(s)."
    )


def test_too_many_inputs_with_none_missing_end_in_tritons_lone_bracket() -> None:
    assert refusal(ONE, given("X"), given("Z")) == UNKNOWN + (
        "expected 1 inputs but got 2 inputs for model 'm'. Got input(s) ['X','Z'], but missing "
        "required input(s) ]. Please provide all required input(s)."
    )


def test_a_request_without_inputs_hears_of_their_number_and_not_of_shapes() -> None:
    config = model(declared("A"), declared("B"), declared("C"), max_batch_size=8)
    assert "got 0 inputs" in refusal(config)


def test_an_unknown_input_is_refused_without_the_request_id() -> None:
    found = refusal(WITH_OPTIONAL, given("A"), given("X"), id="r1")
    assert found == "unexpected inference input 'X' for model 'm'"


def test_an_unknown_output_is_refused_without_the_request_id() -> None:
    found = refusal(ONE, given("X"), outputs=(RequestedOutput("Z"),), id="r1")
    assert found == "unexpected inference output 'Z' for model 'm'"


def test_outputs_are_checked_before_inputs() -> None:
    assert "unexpected inference output" in refusal(ONE, outputs=(RequestedOutput("Z"),))


def test_a_duplicate_input_is_refused() -> None:
    assert refusal(ONE, given("X"), given("X")) == UNKNOWN + ("input 'X' already exists in request")


def test_a_duplicate_output_is_refused() -> None:
    wanted = (RequestedOutput("Y"), RequestedOutput("Y"))
    assert refusal(ONE, given("X"), outputs=wanted) == UNKNOWN + (
        "output 'Y' already exists in request"
    )


def test_a_wrong_datatype_is_refused() -> None:
    config = model(declared("X", DataType.TYPE_INT32))
    assert refusal(config, given("X")) == UNKNOWN + (
        "inference input 'X' data-type is 'FP32', but model 'm' expects 'INT32'"
    )


def test_a_datatype_is_called_by_its_wire_name() -> None:
    assert refusal(TEXTS, given("X")).endswith(
        "inference input 'X' data-type is 'FP32', but model 'm' expects 'BYTES'"
    )


def test_refusals_carry_the_id_of_the_request() -> None:
    found = refusal(ONE, given("X"), given("X"), id="r1")
    assert found == "[request id: r1] input 'X' already exists in request"


# Shapes and batches (protocol 22.3).


@pytest.mark.parametrize("shape", [(8,), (16, 1), (), (1, 16)])
def test_a_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    rendered = str(list(shape)).replace(" ", "")
    assert refusal(ONE, given("X", shape)) == UNKNOWN + (
        f"unexpected shape for input 'X' for model 'm'. Expected [16], got {rendered}. "
    )


@pytest.mark.parametrize("shape", [(1, 8), (1,), (1, 16, 1)])
def test_a_wrong_shape_of_a_batch_gets_the_note(shape: tuple[int, ...]) -> None:
    rendered = str(list(shape)).replace(" ", "")
    assert refusal(BATCHED, given("X", shape)) == UNKNOWN + (
        f"unexpected shape for input 'X' for model 'm'. Expected [-1,16], got {rendered}. {NOTE}"
    )


def test_an_empty_shape_has_no_batch() -> None:
    assert refusal(BATCHED, given("X", ())) == UNKNOWN + (
        "input 'X' has no shape but model requires batch dimension for 'm'"
    )


def test_inputs_agree_on_the_batch() -> None:
    config = model(declared("A"), declared("B"), max_batch_size=8)
    assert refusal(config, given("A", (2, 16)), given("B", (3, 16))) == UNKNOWN + (
        "input 'B' batch size does not match other inputs for 'm'"
    )


def test_a_batch_beyond_the_limit_is_refused() -> None:
    assert check(BATCHED, given("X", (8, 16))) == 8
    assert refusal(BATCHED, given("X", (9, 16))) == UNKNOWN + (
        "inference request batch-size must be <= 8 for 'm'"
    )


@pytest.mark.parametrize(
    ("config", "shape", "rendered"),
    [(BATCHED, (1, -1), "[1,-1]"), (model(declared("X", dims=(-1,))), (-1,), "[-1]")],
)
def test_a_variable_dim_in_a_request_is_refused(
    config: ModelConfig, shape: tuple[int, ...], rendered: str
) -> None:
    assert refusal(config, given("X", shape)) == UNKNOWN + (
        "All input dimensions should be specified for input 'X' for model 'm', got " + rendered
    )


def test_a_dim_below_minus_one_is_invalid() -> None:
    config = model(declared("X", dims=(-1, -1)))
    assert refusal(config, given("X", (2, -2)), id="r1") == (
        "tensor 'X' contains an invalid dimension [2,-2]"
    )


def test_a_batch_of_nothing_fails_the_size_check() -> None:
    assert refusal(BATCHED, given("X", (0, 16))) == UNKNOWN + (
        "input byte size mismatch for input 'X' for model 'm'. Expected 64, got 0"
    )
    assert refusal(TEXT_BATCHES, given("X", (0, 3), Datatype.BYTES, ())) == UNKNOWN + (
        "expected 3 string elements for inference input 'X' for model 'm', got 0"
    )


def test_a_size_beyond_all_bounds_is_refused() -> None:
    config = model(declared("X", dims=(-1, -1)))
    assert refusal(config, given("X", (2**40, 2**40), data=b""), id="r1") == (
        "byte size for tensor 'X' exceeds maximum size of 9223372036854775807"
    )


@pytest.mark.parametrize(
    "data_type", [DataType.TYPE_UINT8, DataType.TYPE_FP32, DataType.TYPE_STRING]
)
@pytest.mark.parametrize("shape", [(2**63, 0), (0, 2**64 - 1), (0, 2**62, 2)])
def test_no_elements_do_not_excuse_a_shape_beyond_all_bounds(
    data_type: DataType, shape: tuple[int, ...]
) -> None:
    config = model(declared("X", data_type, dims=(-1,) * len(shape)))
    tensor = Tensor("X", config.input[0].datatype, shape, b"")
    assert refusal(config, tensor, id="r1") == (
        "byte size for tensor 'X' exceeds maximum size of 9223372036854775807"
    )


# Data sizes (protocol 22.4).


@pytest.mark.parametrize("size", [0, 60, 63, 65, 68])
def test_a_wrong_number_of_bytes_is_refused(size: int) -> None:
    assert refusal(ONE, given("X", data=b"\0" * size)) == UNKNOWN + (
        f"input byte size mismatch for input 'X' for model 'm'. Expected 64, got {size}"
    )


def test_a_batch_needs_the_bytes_of_all_its_rows() -> None:
    assert refusal(BATCHED, given("X", (2, 16), data=b"\0" * 64)) == UNKNOWN + (
        "input byte size mismatch for input 'X' for model 'm'. Expected 128, got 64"
    )


@pytest.mark.parametrize("data", [(b"a", b"b"), b"\1\0\0\0a\1\0\0\0b"])
def test_too_few_strings_are_refused(data: bytes | tuple[bytes, ...]) -> None:
    assert refusal(TEXTS, given("X", (3,), Datatype.BYTES, data)) == UNKNOWN + (
        "expected 3 string elements for inference input 'X' for model 'm', got 2"
    )


@pytest.mark.parametrize(
    "data", [(b"",) * 4, (b"",) * 9, b"\0" * 16, b"\0" * 36, b"\0" * 18, b"\0" * 12 + b"\7\0\0\0a"]
)
def test_too_many_strings_are_refused(data: bytes | tuple[bytes, ...]) -> None:
    assert refusal(TEXTS, given("X", (3,), Datatype.BYTES, data)) == UNKNOWN + (
        "unexpected number of string elements 4 for inference input 'X' for model 'm', expecting 3"
    )


def test_a_cut_length_is_refused() -> None:
    data = b"\1\0\0\0a" + b"\0\0"
    assert refusal(TEXTS, given("X", (3,), Datatype.BYTES, data)) == UNKNOWN + (
        "incomplete string length indicator for inference input 'X' for model 'm', expecting 4 "
        "bytes but only 2 bytes available. Please make sure the string length indicator is in "
        "one buffer."
    )


def test_a_cut_string_is_refused_without_the_request_id() -> None:
    data = b"\x1e\0\0\0abc"
    assert refusal(TEXTS, given("X", (3,), Datatype.BYTES, data), id="r1") == (
        "incomplete string data for inference input 'X', expecting string of length 30 but only "
        "3 bytes available"
    )


# The order of the checks (protocol 7.2): the first failure wins.


@pytest.mark.parametrize(
    ("tensor", "first"),
    [
        (given("X", (), Datatype.INT8), "has no shape"),
        (given("X", (9, 8), Datatype.INT8), "batch-size must be <= 8"),
        (given("X", (1, 8), Datatype.INT8), "data-type is 'INT8'"),
        (given("X", (1, 8), data=b""), "unexpected shape"),
        (given("X", (1, 16), data=b""), "input byte size mismatch"),
    ],
)
def test_the_first_failure_is_reported(tensor: Tensor, first: str) -> None:
    assert first in refusal(BATCHED, tensor)
