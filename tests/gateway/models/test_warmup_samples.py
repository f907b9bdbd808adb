"""Requests of a warm-up; the texts of refusals are recorded from Triton."""

import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gateway.config import ModelConfig, ModelInput, ModelWarmup, WarmupInput
from gateway.config.data_type import DataType
from gateway.config.scheduling import SequenceBatching
from gateway.errors import Code, InferenceError
from gateway.models.warmup import read_samples
from gateway.tensor import Datatype, join_elements

ANONYMOUS = "[request id: <id_unknown>] "


def model(*dims: int, kind: DataType = DataType.TYPE_INT32, batch: int = 0) -> ModelConfig:
    tensor = ModelInput(name="INPUT", data_type=kind, dims=dims)
    return ModelConfig(name="m", max_batch_size=batch, input=(tensor,))


def given(*dims: int, kind: DataType = DataType.TYPE_INT32, **source: object) -> WarmupInput:
    return replace(
        WarmupInput(data_type=kind, dims=dims),
        **source,  # type: ignore[arg-type]  # by its field names
    )


def with_warmup(config: ModelConfig, batch_size: int = 1, **inputs: WarmupInput) -> ModelConfig:
    setting = ModelWarmup(name="s", batch_size=batch_size, inputs=inputs)
    return replace(config, model_warmup=(setting,))


def refused(config: ModelConfig, folder: Path, code: Code = Code.INVALID_ARG) -> str:
    with pytest.raises(InferenceError) as caught:
        read_samples(config, folder)
    assert caught.value.code is code
    return caught.value.message


def provide(folder: Path, name: str, data: bytes) -> None:
    (folder / "warmup").mkdir(exist_ok=True)
    (folder / "warmup" / name).write_bytes(data)


def the_input(config: ModelConfig, folder: Path) -> object:
    (sample,) = read_samples(config, folder)
    (tensor,) = sample.requests[0].inputs
    return tensor.array().tolist()


# What is made.


def test_samples_are_in_order_and_without_empty_ones(tmp_path: Path) -> None:
    zeros = {"INPUT": given(2, zero_data=True)}
    settings = (
        ModelWarmup(name="twice", batch_size=3, count=2, inputs=zeros),
        ModelWarmup(name="never", batch_size=0, inputs={"INPUT": given(-1)}),
        ModelWarmup(name="once", batch_size=1, inputs=zeros),
    )
    samples = read_samples(replace(model(2, batch=4), model_warmup=settings), tmp_path)
    assert [(each.name, len(each.requests), each.count) for each in samples] == [
        ("twice", 3, 2),
        ("once", 1, 1),
    ]
    (tensor,) = samples[0].requests[2].inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("INPUT", Datatype.INT32, (1, 2))
    assert samples[0].requests[0].model == "m"


@pytest.mark.parametrize("chosen", [True, False])
def test_zeros_are_zeros_even_if_the_field_is_false(tmp_path: Path, chosen: bool) -> None:
    assert the_input(with_warmup(model(2), INPUT=given(2, zero_data=chosen)), tmp_path) == [0, 0]


@pytest.mark.parametrize("kind", [each for each in DataType if each is not DataType.TYPE_INVALID])
@pytest.mark.parametrize("source", ["zero_data", "random_data"])
def test_every_datatype_can_be_made(tmp_path: Path, kind: DataType, source: str) -> None:
    config = with_warmup(model(-1, 4, kind=kind), INPUT=given(3, 4, kind=kind, **{source: True}))
    (sample,) = read_samples(config, tmp_path)
    assert sample.requests[0].inputs[0].array().shape == (3, 4)


def test_random_data_differs_and_strings_are_empty(tmp_path: Path) -> None:
    found = the_input(with_warmup(model(-1), INPUT=given(100, random_data=True)), tmp_path)
    assert isinstance(found, list)
    assert len(set(found)) > 50
    text = DataType.TYPE_STRING
    config = with_warmup(model(-1, kind=text), INPUT=given(2, kind=text, random_data=True))
    assert the_input(config, tmp_path) == [b"", b""]


def test_random_truths_are_true_or_false(tmp_path: Path) -> None:
    kind = DataType.TYPE_BOOL
    config = with_warmup(model(-1, kind=kind), INPUT=given(100, kind=kind, random_data=True))
    (sample,) = read_samples(config, tmp_path)
    assert set(bytes(sample.requests[0].inputs[0].raw())) == {0, 1}


def test_a_tensor_may_have_no_elements(tmp_path: Path) -> None:
    assert the_input(with_warmup(model(-1), INPUT=given(0, zero_data=True)), tmp_path) == []


def test_a_file_gives_what_is_needed_and_the_rest_is_ignored(tmp_path: Path) -> None:
    provide(tmp_path, "d", struct.pack("<3i", 7, 8, 9))
    config = with_warmup(model(2, batch=4), 2, INPUT=given(2, input_data_file="d"))
    (sample,) = read_samples(config, tmp_path)
    assert [each.inputs[0].array().tolist() for each in sample.requests] == [[[7, 8]]] * 2


def test_a_file_of_strings_has_them_with_their_lengths(tmp_path: Path) -> None:
    provide(tmp_path, "d", join_elements([b"ab", b"c"]))
    text = DataType.TYPE_STRING
    config = with_warmup(model(2, kind=text), INPUT=given(2, kind=text, input_data_file="d"))
    (sample,) = read_samples(config, tmp_path)
    assert sample.requests[0].inputs[0].elements() == (b"ab", b"c")


def test_tensors_of_a_sequence_batcher_are_given_by_their_names(tmp_path: Path) -> None:
    config = with_warmup(
        replace(model(2, batch=1), sequence_batching=SequenceBatching()),
        INPUT=given(2, zero_data=True),
        START=given(1, zero_data=True),
    )
    (sample,) = read_samples(config, tmp_path)
    found = {each.name: each.shape for each in sample.requests[0].inputs}
    assert found == {"INPUT": (1, 2), "START": (1, 1)}


# What is refused.


@pytest.mark.parametrize("dim", [-1, -2])
def test_every_dim_must_be_known(tmp_path: Path, dim: int) -> None:
    config = with_warmup(model(-1), INPUT=given(dim, zero_data=True))
    assert refused(config, tmp_path) == (
        "warmup setting expects all variable-size dimensions are specified for input 'INPUT'"
    )


def test_an_input_without_a_data_source_is_refused(tmp_path: Path) -> None:
    assert refused(with_warmup(model(2), INPUT=given(2)), tmp_path) == (
        f"{ANONYMOUS}warmup setting expects input 'INPUT' to have input_data_type set"
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"INPUT": given(3, zero_data=True)},
            f"{ANONYMOUS}unexpected shape for input 'INPUT' for model 'm'. Expected [2], got [3]. ",
        ),
        (
            {"INPUT": given(2, kind=DataType.TYPE_FP32, zero_data=True)},
            f"{ANONYMOUS}inference input 'INPUT' data-type is 'FP32', but model 'm' expects "
            "'INT32'",
        ),
        (
            {"INPUT": given(2, kind=DataType.TYPE_INVALID, zero_data=True)},
            f"{ANONYMOUS}inference input 'INPUT' data-type is '<invalid>', but model 'm' expects "
            "'INT32'",
        ),
        (
            {},
            f"{ANONYMOUS}expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but "
            "missing required input(s) ['INPUT']. Please provide all required input(s).",
        ),
    ],
)
def test_a_sample_is_checked_as_a_request_is(
    tmp_path: Path, inputs: dict[str, WarmupInput], message: str
) -> None:
    assert refused(with_warmup(model(2), **inputs), tmp_path) == message


@pytest.mark.parametrize(("limit", "size"), [(0, 2), (4, 5), (4, 2**32 - 1)])
def test_no_more_requests_together_than_the_model_batches(
    tmp_path: Path, limit: int, size: int
) -> None:
    config = with_warmup(model(2, batch=limit), size, INPUT=given(2, zero_data=True))
    assert refused(config, tmp_path) == (
        f"failed to run warmup sample 's': batch size {size} for 'm', max allowed is {limit}; "
    )


@pytest.mark.parametrize(
    ("dims", "batch"), [((2**62,), 1), ((2**32, 2**32), 1), ((2**29,), 1), ((1,), 2**31 - 1)]
)
@pytest.mark.parametrize("kind", [DataType.TYPE_INT32, DataType.TYPE_STRING])
def test_what_memory_cannot_hold_is_not_made(
    tmp_path: Path, dims: tuple[int, ...], batch: int, kind: DataType
) -> None:
    anything = model(*(-1 for _ in dims), kind=kind, batch=batch)
    config = with_warmup(anything, batch, INPUT=given(*dims, kind=kind, random_data=True))
    assert "more than the 2147483647 that a sample may have" in refused(config, tmp_path)


def test_a_file_that_is_too_short_has_tritons_error(tmp_path: Path) -> None:
    provide(tmp_path, "d", b"abc")
    config = with_warmup(model(2), INPUT=given(2, input_data_file="d"))
    assert refused(config, tmp_path) == (
        f"{ANONYMOUS}warmup setting expects 8 bytes, but the data provided from donly has 3 bytes"
    )


@pytest.mark.parametrize(
    ("elements", "cut", "message"),
    [
        ([b"ab"], 0, "expected 2 string elements for inference input 'INPUT' for model 'm', got 1"),
        (
            [b"a", b"b", b"c"],
            0,
            "unexpected number of string elements 3 for inference input 'INPUT' for model 'm', "
            "expecting 2",
        ),
        ([b"ab", b"cd"], 1, "expecting string of length 2 but only 1 bytes available"),
    ],
)
def test_a_file_of_strings_must_have_as_many_as_the_shape(
    tmp_path: Path, elements: list[bytes], cut: int, message: str
) -> None:
    data = join_elements(elements)
    provide(tmp_path, "d", data[: len(data) - cut])
    text = DataType.TYPE_STRING
    config = with_warmup(model(2, kind=text), INPUT=given(2, kind=text, input_data_file="d"))
    assert message in refused(config, tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent", "No such file or directory"),
        ("folder", "Not a regular file"),
        ("", "Not a regular file"),
        ("pipe", "Not a regular file"),
        ("d/e", "Not a directory"),
        ("loop", "Invalid name"),
        ("with\0nul", "Invalid name"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_without_the_hosts_path(
    tmp_path: Path, name: str, reason: str
) -> None:
    provide(tmp_path, "d", b"")
    (tmp_path / "warmup" / "folder").mkdir()
    os.mkfifo(tmp_path / "warmup" / "pipe")
    (tmp_path / "warmup" / "loop").symlink_to("loop")
    config = with_warmup(model(2), INPUT=given(2, input_data_file=name))
    message = refused(config, tmp_path, Code.INTERNAL)
    assert message == f"failed to open text file for read m/warmup/{name}: {reason}"


@pytest.mark.parametrize("name", ["../secret", "{absolute}", "link", "folder/../../secret"])
def test_a_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(8))
    provide(tmp_path, "d", b"")
    (tmp_path / "warmup" / "link").symlink_to(secret)
    named = name.format(absolute=secret)
    config = with_warmup(model(2), INPUT=given(2, input_data_file=named))
    assert refused(config, tmp_path) == (
        f"warmup data file '{named}' is outside the warmup directory of model 'm'"
    )


def test_a_link_inside_the_folder_is_followed(tmp_path: Path) -> None:
    provide(tmp_path, "data", np.array([4, 5], np.int32).tobytes())
    (tmp_path / "warmup" / "link").symlink_to("data")
    config = with_warmup(model(2), INPUT=given(2, input_data_file="link"))
    assert the_input(config, tmp_path) == [4, 5]
