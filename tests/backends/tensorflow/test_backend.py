"""Loads of TensorFlow models: their sessions, their checks and their failures."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow.compat.v1 as tf
from numpy.linalg import _umath_linalg

from gateway.backend_loader import BackendLoader
from gateway.config import (
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    ModelInput,
    ModelOperations,
    ModelOutput,
)
from gateway.config.data_type import DataType
from gateway.config.optimization import Accelerator, ExecutionAccelerators, OptimizationPolicy
from gateway.errors import Code, InferenceError
from tests.backends.tensorflow.models import (
    MadeModel,
    backend,
    save,
    save_graph_def,
    scaled,
    sums,
    unchanged,
)
from tests.builders import soon
from tests.tensor_backends import ask, context, floats

FP32 = DataType.TYPE_FP32
EMPTY = ModelConfig(name="m", backend="tensorflow", platform="tensorflow_savedmodel")
X = ModelInput(name="x", data_type=FP32, dims=(2,))
Y = ModelOutput(name="y", data_type=FP32, dims=(2,))
FIXED = replace(EMPTY, max_batch_size=4, input=(X,), output=(Y,))
FIXED_GRAPH_DEF = replace(FIXED, platform="tensorflow_graphdef")
UNKNOWN = None
"""The shape of a tensor of any rank."""


async def failure(
    folder: Path, config: ModelConfig = FIXED, group: InstanceGroup | None = None
) -> InferenceError:
    """The reason why a model cannot be loaded; never with a path of the host or of sources."""
    made = context(config, folder, group) if group else context(config, folder)
    with pytest.raises(InferenceError) as caught:
        await soon(backend().load(made))
    message = caught.value.message
    assert str(folder.parents[1]) not in message
    assert not re.search(r"\.(cc|py)\b|\n|site-packages|\{\{", message)
    return caught.value


def test_the_backend_is_found_by_its_name() -> None:
    assert type(BackendLoader().get("tensorflow")) is type(backend())


def test_the_environment_of_other_processes_is_unchanged() -> None:
    assert not {"TF_CPP_MIN_LOG_LEVEL", "TF_OVERRIDE_GLOBAL_THREADPOOL"} & os.environ.keys()


@pytest.mark.parametrize(("most", "sessions"), [("1", 3), ("2", 2), ("5", 1)])
async def test_instances_share_sessions(folder: Path, most: str, sessions: int) -> None:
    runtime = backend()
    config = replace(FIXED, parameters={"MAX_SESSION_SHARE_COUNT": most})
    save(unchanged(), folder)
    loaded = [await soon(runtime.load(context(config, folder))) for _ in range(3)]
    found = {id(each._session) for each in loaded}  # type: ignore[attr-defined]  # noqa: SLF001
    assert len(found) == sessions
    for each in loaded:
        await soon(each.close())


async def test_a_session_whose_instances_are_closed_is_not_used_again(folder: Path) -> None:
    runtime = backend()
    config = replace(FIXED, parameters={"MAX_SESSION_SHARE_COUNT": "9"})
    save(unchanged(), folder)
    for _ in range(2):
        await soon((await soon(runtime.load(context(config, folder)))).close())


def replace_file(file: Path) -> None:
    """Replace it by a copy, with folders as old as before."""
    new = file.with_suffix(".new")
    new.write_bytes(file.read_bytes())
    new.replace(file)
    for each in (file.parent, *file.parent.rglob("*")):
        os.utime(each, ns=(1, 1))


async def test_a_reload_shares_no_session_of_other_files(folder: Path) -> None:
    runtime = backend()
    config = replace(FIXED, parameters={"MAX_SESSION_SHARE_COUNT": "9"})
    save(unchanged(), folder)
    loaded = []
    for _ in range(2):
        replace_file(folder / "model.savedmodel" / "saved_model.pb")
        loaded.append(await soon(runtime.load(context(config, folder))))
    first, second = (each._session for each in loaded)  # type: ignore[attr-defined]  # noqa: SLF001
    assert first is not second
    for instance in loaded:
        await soon(instance.close())


async def test_a_session_has_threads_of_its_own(folder: Path) -> None:
    """The first session of the process does not set the threads of later ones."""
    save(unchanged(), folder)
    threads = {"TF_NUM_INTRA_THREADS": "7", "TF_NUM_INTER_THREADS": "5"}
    before = _threads()
    instance = await soon(backend().load(context(replace(FIXED, parameters=threads), folder)))
    await ask(instance, floats(x=[[1, 2]]))
    assert _threads() - before >= 7 + 5
    await soon(instance.close())
    assert _threads() - before < 7


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("config", [FIXED, FIXED_GRAPH_DEF])
async def test_a_missing_file_is_named_without_its_place_on_the_host(
    folder: Path, config: ModelConfig
) -> None:
    found = await failure(folder, config)
    assert found.code is Code.UNAVAILABLE
    name = config.platform.removeprefix("tensorflow_")
    assert found.message == f"unable to find '1/model.{name}' for model instance 'm'"


async def test_a_folder_without_a_saved_model_is_named(folder: Path) -> None:
    (folder / "model.savedmodel").mkdir()
    found = await failure(folder)
    assert found.message == (
        "unable to find '1/model.savedmodel/saved_model.pb' for model instance 'm'"
    )


async def test_another_platform_is_refused(folder: Path) -> None:
    found = await failure(folder, replace(FIXED, platform="tensorflow_lite"))
    assert found.message == "platform tensorflow_lite not supported for TensorFlow model 'm'"


@pytest.mark.parametrize("bytes_kept", [5, -5])
async def test_a_saved_model_that_is_cut_short_is_refused(folder: Path, bytes_kept: int) -> None:
    file = save(unchanged(), folder) / "model.savedmodel" / "saved_model.pb"
    file.write_bytes(file.read_bytes()[:bytes_kept])
    assert (await failure(folder)).message.startswith(
        "unable to load model 'm': '1/model.savedmodel' cannot be read: Error parsing message with "
        "type 'tensorflow.SavedModel'"
    )


async def test_variables_that_are_missing_are_named_in_one_line(folder: Path) -> None:
    shutil.rmtree(save(scaled(2.0), folder) / "model.savedmodel" / "variables")
    assert (await failure(folder)).message == (
        "unable to load model 'm': The passed save_path is not a valid checkpoint: "
        "model.savedmodel/variables/variables"
    )


async def test_variables_that_are_cut_short_are_refused(folder: Path) -> None:
    variables = save(scaled(2.0), folder) / "model.savedmodel" / "variables"
    for each in variables.iterdir():
        each.write_bytes(each.read_bytes()[:1])
    assert (await failure(folder)).message == (
        "unable to load model 'm': file is too short to be an sstable"
    )


async def test_another_tag_is_refused_and_found_by_its_parameter(folder: Path) -> None:
    save(unchanged(), folder, tag="tuned")
    found = await failure(folder)
    assert found.message == (
        "unable to load model 'm', expected 'serve' tag; tags of the SavedModel: tuned"
    )
    config = replace(FIXED, parameters={"TF_GRAPH_TAG": "tuned"})
    await soon((await soon(backend().load(context(config, folder)))).close())


async def test_another_signature_is_refused_if_it_is_asked_for(folder: Path) -> None:
    save(unchanged(), folder, signature="predict")
    config = replace(FIXED, parameters={"TF_SIGNATURE_DEF": "classify"})
    found = await failure(folder, config)
    assert found.message == (
        "unable to load model 'm', expected 'classify' signature; signatures of the SavedModel: "
        "predict"
    )
    for given in ({"TF_SIGNATURE_DEF": "predict"}, {}):
        served = replace(FIXED, parameters=given)
        await soon((await soon(backend().load(context(served, folder)))).close())


@pytest.mark.parametrize("content", [b"\x0a\xffcut", b"no model", b'{"a": 1}'])
async def test_a_graph_def_of_another_format_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.graphdef").write_bytes(content)
    assert (await failure(folder, FIXED_GRAPH_DEF)).message.startswith(
        "unable to load model 'm': '1/model.graphdef' cannot be read: Error parsing message"
    )


async def test_a_graph_def_that_is_cut_short_is_refused(folder: Path) -> None:
    file = save_graph_def(sums(), folder) / "model.graphdef"
    file.write_bytes(file.read_bytes()[:-3])
    assert "cannot be read" in (await failure(folder, FIXED_GRAPH_DEF)).message


async def test_an_empty_graph_def_is_refused(folder: Path) -> None:
    (folder / "model.graphdef").touch()
    found = await failure(folder, FIXED_GRAPH_DEF)
    assert found.message == "model m has an empty network"


async def test_a_graph_def_of_unknown_operations_is_refused(folder: Path) -> None:
    graph = unchanged().graph.as_graph_def()
    graph.node[1].op = "NoSuchOperation"
    (folder / "model.graphdef").write_bytes(graph.SerializeToString())
    assert (await failure(folder, FIXED_GRAPH_DEF)).message.startswith(
        "unable to load model 'm': Op type not registered 'NoSuchOperation'. Make sure"
    )


@pytest.mark.parametrize("kind", [save, save_graph_def])
async def test_names_and_datatypes_must_be_the_models(
    folder: Path, kind: Callable[[MadeModel, Path], Path]
) -> None:
    kind(unchanged(), folder)
    base = FIXED if kind is save else FIXED_GRAPH_DEF
    wrong = replace(base, input=(replace(X, name="z"),))
    assert (await failure(folder, wrong)).message == (
        "unexpected inference input 'z', allowed inputs are: x"
    )
    wrong = replace(base, output=(replace(Y, name="z"),))
    assert (await failure(folder, wrong)).message == (
        "unexpected inference output 'z', allowed outputs are: y"
    )
    wrong = replace(base, input=(replace(X, data_type=DataType.TYPE_INT32),))
    assert (await failure(folder, wrong)).message == (
        "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'x', model "
        "provides TYPE_FP32"
    )


async def test_the_number_of_inputs_must_be_the_models(folder: Path) -> None:
    both = replace(FIXED, input=(X, replace(X, name="z")))
    save(unchanged(), folder)
    assert (await failure(folder, both)).message == (
        "unable to load model 'm', configuration expects 2 inputs, model provides 1"
    )
    save_graph_def(unchanged(), folder)
    assert (await failure(folder, replace(both, platform="tensorflow_graphdef"))).message == (
        "unable to load model 'm', configuration expects 2 inputs, model provides at most 1"
    )


async def test_dims_of_inputs_may_be_any_where_the_models_are(folder: Path) -> None:
    save(unchanged(shape=(None, None)), folder)
    found = await failure(folder)
    assert found.message == (
        "model 'm', tensor 'y': the model computes shape [-1,-1] but the model configuration "
        "specifies shape [-1,2]"
    )
    exact = replace(FIXED, output=(replace(Y, dims=(-1,)),))
    await soon((await soon(backend().load(context(exact, folder)))).close())
    wrong = replace(exact, input=(replace(X, dims=(2, 2)),))
    assert (
        "the model expects 2 dimensions (shape [-1,-1])" in (await failure(folder, wrong)).message
    )


async def test_tensors_of_unknown_rank_have_the_dims_of_the_config(folder: Path) -> None:
    save(unchanged(shape=UNKNOWN), folder)
    await soon((await soon(backend().load(context(FIXED, folder)))).close())


async def test_a_tensor_that_the_protocol_lacks_is_refused(folder: Path) -> None:
    save(unchanged(tf.complex64), folder)
    with pytest.raises(InferenceError, match="'x' of the model is a DT_COMPLEX64"):
        backend().complete(EMPTY, folder)
    assert "DT_COMPLEX64" in (await failure(folder)).message


async def test_instances_are_on_the_cpu(folder: Path) -> None:
    save(unchanged(), folder)
    group = InstanceGroup(name="m", kind=InstanceKind.KIND_GPU)
    assert (await failure(folder, FIXED, group)).message == (
        "unable to load model 'm', TensorFlow models run on CPUs: found KIND_GPU, expected "
        "KIND_CPU or KIND_MODEL"
    )


def accelerated(**which: tuple[Accelerator, ...]) -> ModelConfig:
    policy = OptimizationPolicy(execution_accelerators=ExecutionAccelerators(**which))
    return replace(FIXED, optimization=policy)


async def test_execution_accelerators_of_cpus_are_refused(folder: Path) -> None:
    save(unchanged(), folder)
    openvino = (Accelerator(name="openvino"),)
    found = await failure(folder, accelerated(cpu_execution_accelerator=openvino))
    assert found.code is Code.UNSUPPORTED
    assert found.message == ("CPU Execution Accelerator is not supported in TensorFlow backend")


async def test_execution_accelerators_of_gpus_are_ignored(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(unchanged(), folder)
    config = accelerated(gpu_execution_accelerator=(Accelerator(name="tensorrt"),))
    await soon((await soon(backend().load(context(config, folder)))).close())
    assert "GPU Execution Accelerator will be ignored" in caplog.text


def with_library(name: str) -> ModelConfig:
    return replace(FIXED, model_operations=ModelOperations(op_library_filename=(name,)))


@pytest.mark.parametrize("place", ["", ".."])
async def test_a_library_of_operations_is_loaded_from_the_models_folder(
    folder: Path, place: str
) -> None:
    """Any library can be loaded; this one of numpy adds no operation."""
    save(unchanged(), folder)
    shutil.copy(_umath_linalg.__file__, folder / place / "own.so")
    await soon((await soon(backend().load(context(with_library("own.so"), folder)))).close())


@pytest.mark.parametrize("name", ["/usr/lib/libc.so.6", "../../other.so"])
async def test_a_library_of_operations_is_a_file_of_the_model(folder: Path, name: str) -> None:
    save(unchanged(), folder)
    assert "outside of the model's folder" in (await failure(folder, with_library(name))).message


async def test_a_file_that_is_no_library_is_refused(folder: Path) -> None:
    (save(unchanged(), folder) / "own.so").write_bytes(b"no library")
    found = await failure(folder, with_library("own.so"))
    assert found.message.startswith("unable to load model 'm': own.so: ")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.json", "", "unable to find 'missing.json'"),
        ("../../other.json", "", "outside of the model's folder"),
        ("ops.json", "{", 'is expected to be JSON such as {"init_ops": ["init"]}'),
        ("ops.json", '{"init_ops": "init"}', "is expected to be JSON"),
        ("ops.json", '{"init_ops": ["none"]}', "'none'"),
    ],
)
async def test_a_wrong_file_of_initial_operations_is_refused(
    folder: Path, name: str, content: str, reason: str
) -> None:
    save_graph_def(scaled(2.0), folder)
    if content:
        (folder / name).write_text(content)
    config = replace(FIXED_GRAPH_DEF, parameters={"TF_INIT_OPS_FILE": name})
    assert reason in (await failure(folder, config)).message
