"""Loads of OpenVINO models: their completion, their checks and their failures."""

import asyncio
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as op
import pytest

from backends.openvino import backend as backend_module
from gateway.backend_loader import BackendLoader
from gateway.config import InstanceGroup, InstanceKind, ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.models.config_checks import check_tensors
from tests import onnx_models
from tests.backends.openvino.conftest import (
    backend,
    bounded,
    pairs,
    port,
    products,
    save,
    sums,
    unchanged,
)
from tests.backends.openvino.paddle_models import save_products
from tests.builders import WAIT_SECS, soon
from tests.tensor_backends import Load, ask, context, floats

FP32 = DataType.TYPE_FP32
EMPTY = ModelConfig(name="m", backend="openvino")
X = ModelInput(name="x", data_type=FP32, dims=(2,))
Y = ModelOutput(name="y", data_type=FP32, dims=(2,))
FIXED = ModelConfig(name="m", backend="openvino", max_batch_size=4, input=(X,), output=(Y,))


def complete(made: Any, folder: Path, config: ModelConfig = EMPTY, **settings: str) -> ModelConfig:
    whole = backend(**settings).complete(config, save(made, folder))
    check_tensors(whole)
    return whole


async def failure(folder: Path, config: ModelConfig = FIXED) -> InferenceError:
    """The reason why a model cannot be loaded; never with a path of the host or of C++ sources."""
    with pytest.raises(InferenceError) as caught:
        await soon(backend().load(context(config, folder)))
    message = caught.value.message
    assert str(folder.parents[1]) not in message
    assert not re.search(r"src/|\.cpp:\d|\n", message)
    return caught.value


def test_the_backend_is_found_by_its_name() -> None:
    assert type(BackendLoader().get("openvino")) is type(backend())


# Completion.


def test_a_model_whose_first_dimensions_are_free_batches(folder: Path) -> None:
    found = complete(sums(), folder)
    assert found.max_batch_size == 4
    assert found.dynamic_batching == DynamicBatching(preferred_batch_size=(4,))
    assert [(each.name, each.data_type, each.dims) for each in found.input] == [
        ("A", FP32, (16,)),
        ("B", FP32, (16,)),
    ]
    assert [each.name for each in found.output] == ["SUM", "DIFFERENCE"]
    assert complete(sums(), folder, default_max_batch_size="9").max_batch_size == 9


def test_a_layout_with_a_batch_says_that_the_model_batches(folder: Path) -> None:
    made = sums([3, 16])
    assert complete(made, folder).max_batch_size == 0
    for each in (*made.inputs, *made.outputs):
        openvino.layout_helpers.set_layout(each, openvino.Layout("NC"))
    found = complete(made, folder)
    assert (found.max_batch_size, found.input[0].dims) == (4, (16,))


def test_an_output_without_a_name_has_that_of_its_operation(folder: Path) -> None:
    made = unchanged(np.float32)
    config = replace(FIXED, output=(replace(Y, name="x"),))
    assert complete(made, folder, config) == config


# Loads.


async def test_a_model_without_a_config_is_served(load: Load) -> None:
    ones, twos = np.ones((1, 16)), np.full((1, 16), 2)
    (found,) = await ask(await load(sums()), floats(A=twos, B=ones))
    assert found == {"SUM": [[3] * 16], "DIFFERENCE": [[1] * 16]}


async def test_an_onnx_model_is_served(load: Load, folder: Path) -> None:
    onnx_models.save(onnx_models.add_sub(), folder)
    instance = await load(None, replace(EMPTY, default_model_filename="model.onnx"))
    ones = np.ones((2, 16))
    (found,) = await ask(instance, floats(INPUT0=ones, INPUT1=ones))
    assert found == {"OUTPUT0": [[2] * 16] * 2, "OUTPUT1": [[0] * 16] * 2}


async def test_a_paddle_model_is_served(load: Load, folder: Path) -> None:
    save_products(folder, [3, 4])
    instance = await load(None, replace(EMPTY, default_model_filename="model.pdmodel"))
    assert await ask(instance, floats(x=[[1, 2], [3, 4]])) == [{"y": [[3, 8], [9, 16]]}]


async def test_a_paddle_model_without_its_parameters_is_refused(folder: Path) -> None:
    (save_products(folder, [3, 4]) / "model.pdiparams").unlink()
    found = await failure(folder, replace(FIXED, default_model_filename="model.pdmodel"))
    assert "openvino error in reading model" in found.message


@pytest.mark.parametrize(("rows", "shared"), [(4, True), (-1, False)])
async def test_instances_share_a_compiled_model_with_fixed_dims(
    folder: Path, rows: int, shared: bool
) -> None:
    """Streams of one with variable dims may answer with each other's shapes."""
    runtime = backend()
    config = runtime.complete(EMPTY, save(sums([rows, 16]), folder))
    first, second = [await soon(runtime.load(context(config, folder))) for _ in range(2)]
    is_shared = first._compiled is second._compiled  # type: ignore[attr-defined]  # noqa: SLF001
    assert is_shared == shared
    for each in (first, second):
        await soon(each.close())
    assert not runtime._shared  # noqa: SLF001


def before(monkeypatch: pytest.MonkeyPatch, step: str, wait: Callable[[ModelConfig], Any]) -> None:
    """Let `wait` run first in a step of loads, in their threads."""
    real = getattr(backend_module, step)

    def waiting(first: Any, config: ModelConfig, folder: Path) -> Any:
        wait(config)
        return real(first, config, folder)

    monkeypatch.setattr(backend_module, step, waiting)


@pytest.mark.parametrize("step", ["read_model", "_compile"])
async def test_a_slow_load_delays_no_other_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    began, ends = threading.Event(), threading.Event()

    def wait(config: ModelConfig) -> None:
        if config.name == "m":
            began.set()
            assert ends.wait(WAIT_SECS)

    before(monkeypatch, step, wait)
    runtime = backend()
    config = replace(
        FIXED, max_batch_size=0, input=(replace(X, dims=(1, 2)),), output=(replace(Y, dims=(1, 2)),)
    )
    other = save(products([2, 3]), tmp_path / "other" / "1")
    slow = asyncio.create_task(runtime.load(context(config, save(products([1, 1]), folder))))
    try:
        assert await asyncio.to_thread(began.wait, WAIT_SECS)
        fast = await soon(runtime.load(context(replace(config, name="other"), other)))
    finally:
        ends.set()
    for each in (fast, await soon(slow)):
        await soon(each.close())
    assert not runtime._turns  # noqa: SLF001


async def test_instances_with_variable_dims_are_compiled_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    before(monkeypatch, "_compile", lambda config: both.wait(WAIT_SECS))
    runtime = backend()
    config = runtime.complete(EMPTY, save(sums(), folder))
    loads = [runtime.load(context(config, folder)) for _ in range(2)]
    for each in await soon(asyncio.gather(*loads)):
        await soon(each.close())


async def test_instances_that_load_at_once_are_compiled_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def wait(config: ModelConfig) -> None:
        compiled.append(config.name)
        time.sleep(0.1)  # the other instances wait for this one

    before(monkeypatch, "_compile", wait)
    runtime = backend()
    config = runtime.complete(EMPTY, save(sums([4, 16]), folder))
    loads = [runtime.load(context(config, folder)) for _ in range(3)]
    loaded = await soon(asyncio.gather(*loads))
    assert compiled == ["m"]
    for each in loaded:
        await soon(each.close())
    assert not runtime._shared  # noqa: SLF001
    assert not runtime._turns  # noqa: SLF001


async def weights_of_reloads(folder: Path, config: ModelConfig, weights: str, made: Path) -> Any:
    """The answers of an instance, and of one that is loaded after a change of its weights."""
    runtime, found = backend(), []
    whole = runtime.complete(config, folder)
    first = await soon(runtime.load(context(whole, folder)))
    (made / weights).replace(folder / weights)
    second = await soon(runtime.load(context(whole, folder)))
    for each in (first, second):
        found += await ask(each, floats(x=[[1, 1]]))
        await soon(each.close())
    return [each["y"] for each in found]


async def test_a_reload_reads_changed_weights(folder: Path, tmp_path: Path) -> None:
    """The first instance is open, and the file of the model is the same."""
    save(products([2, 3]), folder)
    made = save(products([4, 5]), tmp_path / "made")
    assert await weights_of_reloads(folder, EMPTY, "model.bin", made) == [[[2, 3]], [[4, 5]]]


async def test_a_reload_reads_changed_parameters_of_paddle(folder: Path, tmp_path: Path) -> None:
    save_products(folder, [2, 3], rows=1)
    made = save_products(tmp_path / "made", [4, 5], rows=1)
    config = replace(EMPTY, default_model_filename="model.pdmodel")
    assert await weights_of_reloads(folder, config, "model.pdiparams", made) == [
        [[2, 3]],
        [[4, 5]],
    ]


@pytest.mark.parametrize("kind", [InstanceKind.KIND_GPU, InstanceKind.KIND_MODEL])
async def test_instances_are_on_the_cpu(folder: Path, kind: InstanceKind) -> None:
    group = InstanceGroup(name="m", kind=kind)
    with pytest.raises(InferenceError) as refused:
        await soon(backend().load(context(FIXED, save(unchanged(np.float32), folder), group)))
    assert refused.value.message == (
        "unable to load model 'm', Triton OpenVINO backend supports only Kind CPU and AUTO"
    )


async def test_a_missing_file_is_named_without_its_place_on_the_host(folder: Path) -> None:
    found = await failure(folder)
    assert found.code is Code.UNAVAILABLE
    assert found.message == "unable to find '1/model.xml' for model 'm'"


async def test_a_file_that_is_cut_short_is_refused(folder: Path) -> None:
    file = save(unchanged(np.float32), folder) / "model.xml"
    file.write_bytes(file.read_bytes()[:-20])
    found = await failure(folder)
    assert found.message == (
        "unable to load model 'm': '1/model.xml' is cut short, or no model of OpenVINO: expected "
        "</net> at its end"
    )


@pytest.mark.parametrize("name", ["model.onnx", "model.pdmodel"])
@pytest.mark.parametrize("cut", [1, 30])
async def test_a_protobuf_file_that_is_cut_short_is_refused(
    folder: Path, name: str, cut: int, capfd: pytest.CaptureFixture[str]
) -> None:
    onnx_models.save(onnx_models.add_sub(), folder)
    file = save_products(folder, [3, 4]) / name
    file.write_bytes(file.read_bytes()[:-cut])
    found = await failure(folder, replace(FIXED, default_model_filename=name))
    assert found.code is Code.INVALID_ARG
    assert found.message == (
        f"unable to load model 'm': '1/{name}' is cut short, or of another format: its protobuf "
        "fields do not end with the file"
    )
    assert capfd.readouterr() == ("", "")  # the library would try other formats, and print


async def test_an_empty_file_is_refused(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"")
    found = await failure(folder, replace(FIXED, default_model_filename="model.onnx"))
    assert found.message == "unable to load model 'm': '1/model.onnx' is empty"


async def test_weights_that_are_cut_short_are_refused(folder: Path) -> None:
    save(pairs(4), folder)
    (folder / "model.bin").write_bytes(b"")
    assert (await failure(folder)).message.startswith(
        "unable to load model 'm': openvino error in reading model : "
    )


async def test_a_file_of_another_format_is_refused(folder: Path) -> None:
    (folder / "model.tflite").write_bytes(b"no model")
    found = await failure(folder, replace(FIXED, default_model_filename="model.tflite"))
    assert found.message.startswith(
        "unable to load model 'm': openvino error in reading model : Unable to read the model: "
        '"model.tflite"'
    )


async def test_a_text_is_no_onnx_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "model.onnx").write_text("version https://git-lfs.github.com/spec/v1\n")
    found = await failure(folder, replace(FIXED, default_model_filename="model.onnx"))
    assert found.code is Code.INVALID_ARG
    assert found.message == (
        "unable to load model 'm': '1/model.onnx' is text, and not an ONNX file"
    )
    assert capfd.readouterr() == ("", "")  # the library would try other formats, and print


async def test_a_device_that_is_not_there_is_named_by_the_library(folder: Path) -> None:
    config = replace(FIXED, parameters={"TARGET_DEVICE": "NPU"})
    save(unchanged(np.float32), folder)
    assert "openvino error in loading model" in (await failure(folder, config)).message


async def test_names_and_dims_must_be_the_models(folder: Path) -> None:
    save(unchanged(np.float32), folder)
    wrong = replace(FIXED, input=(replace(X, name="z"),))
    assert (await failure(folder, wrong)).message == (
        "unexpected inference input 'z', allowed inputs are: x"
    )
    wrong = replace(FIXED, output=(replace(Y, dims=(3,)),))
    assert (
        "model 'm', tensor 'y': the model expects 2 dimensions (shape [-1,2])"
        in (await failure(folder, wrong)).message
    )


async def test_dims_must_be_within_the_bounds_of_the_model(folder: Path) -> None:
    save(bounded(-1, (2, 8)), folder)
    wide = replace(FIXED, input=(replace(X, dims=(9,)),), output=(replace(Y, dims=(9,)),))
    found = await failure(folder, wide)
    assert (found.code, found.message) == (
        Code.INVALID_ARG,
        "model 'm', tensor 'x': the model expects shape [?,2..8] but the model configuration "
        "specifies shape [-1,9]",
    )


async def test_a_tensor_of_another_datatype_is_converted(load: Load) -> None:
    config = replace(FIXED, output=(replace(Y, data_type=DataType.TYPE_FP64),))
    instance = await load(unchanged(np.int32), config)
    assert await ask(instance, floats(x=[[1, 2]])) == [{"y": [[1, 2]]}]


async def test_an_output_without_a_name_is_converted(load: Load) -> None:
    x = port("x", [-1, 2])
    made = openvino.Model([op.relu(x, name="the_operation")], [x], "unnamed")
    config = replace(
        FIXED, output=(replace(Y, name="the_operation", data_type=DataType.TYPE_FP64),)
    )
    assert await ask(await load(made, config), floats(x=[[1, 2]])) == [{"the_operation": [[1, 2]]}]


async def test_inputs_get_the_dims_of_the_config_if_asked(load: Load, folder: Path) -> None:
    made = sums([1, 8])
    config = ModelConfig(
        name="m",
        input=tuple(ModelInput(name=name, data_type=FP32, dims=(2, 3)) for name in "AB"),
        output=(ModelOutput(name="SUM", data_type=FP32, dims=(2, 3)),),
        parameters={"RESHAPE_IO_LAYERS": "YES"},
    )
    ones = np.ones((2, 3))
    assert await ask(await load(made, config), floats(A=ones, B=ones)) == [{"SUM": [[2] * 3] * 2}]
    wrong = replace(config, input=(replace(config.input[0], dims=(0, 3)), config.input[1]))
    assert (await failure(folder, wrong)).message == (
        "openvino backend does not support dimensions values other than `-1` or positive integers"
    )
