"""Models that cannot be served are refused when they load, with the reason."""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.pytorch.backend import PytorchBackend
from backends.pytorch.inductor import load_inductor
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from tests import torch_models as models
from tests.backends.pytorch.conftest import Load
from tests.torch_models import COMPILES, config_of

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

FP32, STRING = DataType.TYPE_FP32, DataType.TYPE_STRING
X, Y = {"x": FP32}, {"y": FP32}


def cut(path: Path) -> None:
    models.script(models.Linear(), path)
    path.write_bytes(path.read_bytes()[:-400])


def without(path: Path, wanted: str) -> None:
    """A model whose archive lacks a file."""
    models.script(models.Linear(), path.with_name("whole.pt"))
    with zipfile.ZipFile(path.with_name("whole.pt")) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            if not name.endswith(wanted):
                new.writestr(name, old.read(name))


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (lambda path: None, Code.UNAVAILABLE, "unable to find '"),
        (lambda path: path.mkdir(), Code.UNAVAILABLE, "unable to find '"),
        (lambda path: path.touch(), Code.INVALID_ARG, "'model.pt' is no archive of PyTorch"),
        (lambda path: path.write_bytes(b"junk" * 99), Code.INVALID_ARG, "is no archive of PyTorch"),
        (cut, Code.INVALID_ARG, "or cut short"),
        (lambda path: torch.save({"a": 1}, path), Code.INVALID_ARG, "a pickle of torch.save"),
        (lambda path: without(path, "data.pkl"), Code.INTERNAL, "failed to load model 'm': "),
        (lambda path: without(path, "data/0"), Code.INTERNAL, "failed to load model 'm': "),
        (lambda path: without(path, ".py"), Code.INTERNAL, "failed to load model 'm': "),
    ],
)  # fmt: skip
async def test_a_file_that_is_no_whole_model_is_refused(
    make: Callable[[Path], Any], code: Code, text: str, tmp_path: Path, load: Load
) -> None:
    make(tmp_path / "model.pt")
    with pytest.raises(InferenceError) as refused:
        await load(config_of("model.pt", X, Y), tmp_path)
    assert refused.value.code is code
    assert text in refused.value.message
    assert str(tmp_path.parent) not in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("module", "config", "text"),
    [
        (
            models.AddSub(),
            config_of("model.pt", X, Y),
            "unable to load model 'm', configuration expects 1 inputs, model provides 2",
        ),
        (models.Echo(), config_of("model.pt", X, {"y__1": FP32}), "This model has 1 outputs"),
        (
            models.Echo(),
            config_of("model.pt", {}, Y),
            "model configuration must contain at least one input, none were specified.",
        ),
        (
            models.Echo(),
            config_of("model.pt", X, {}),
            "model configuration must contain at least one output, none were specified.",
        ),
        (
            models.Shouting(),
            config_of("model.pt", {"x": STRING}, {"y": STRING}),
            "Triton only supports 1 dimensional List of String as input for 'x' for model 'm'",
        ),
        (
            models.Shouting(),
            config_of("model.pt", {"x": STRING}, {"y": STRING}, dims=(1,), max_batch_size=2),
            "Triton only supports 1 dimensional List of String as input for 'x' for model 'm'",
        ),
        (models.Counting(), config_of("model.pt", X, Y), "An input of type 'int' was detected"),
        (
            models.Echo(),
            config_of("model.pt", X, Y, parameters={"INFERENCE_MODE": "?"}),
            "failed to convert '?' to boolean",
        ),
    ],
)
async def test_a_config_that_the_model_does_not_fit_is_refused(
    module: torch.nn.Module, config: ModelConfig, text: str, tmp_path: Path, load: Load
) -> None:
    models.script(module, tmp_path / "model.pt")
    with pytest.raises(InferenceError) as refused:
        await load(config, tmp_path)
    assert text in refused.value.message


async def test_the_kind_of_a_file_does_not_depend_on_its_name(tmp_path: Path, load: Load) -> None:
    models.export(models.Echo(), tmp_path / "model.pt", torch.zeros(2))
    await load(config_of("model.pt", X, Y, platform="pytorch_libtorch"), tmp_path)


@pytest.mark.parametrize(
    ("platform", "filename"), [("pytorch_libtorch", "model.pt"), ("torch_aoti", "model.pt2")]
)
async def test_the_platform_names_the_default_file(
    platform: str, filename: str, tmp_path: Path, load: Load
) -> None:
    models.script(models.Echo(), tmp_path / filename)
    await load(config_of("", X, Y, platform=platform), tmp_path)


@pytest.mark.parametrize("name", ["../model.pt", "/etc/passwd", "..", "a/../../model.pt"])
async def test_a_file_outside_the_versions_folder_is_refused(
    name: str, tmp_path: Path, load: Load
) -> None:
    folder = tmp_path / "1"
    (folder / "a").mkdir(parents=True)
    for place in (tmp_path, folder / "a"):
        models.script(models.Echo(), place / "model.pt")
    with pytest.raises(InferenceError, match="expected a file in the folder"):
        await load(config_of(name, X, Y), folder)
    await load(config_of("a/model.pt", X, Y), folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
async def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, load: Load) -> None:
    models.script(models.Echo(), tmp_path / "model.pt")
    group = InstanceGroup(name="g", kind=InstanceKind.KIND_GPU)
    with pytest.raises(InferenceError, match=r"group g of model m asks for GPU 0.* finds 0 GPUs"):
        await load(config_of("model.pt", X, Y), tmp_path, group=group)


async def test_kind_model_keeps_the_devices_of_the_model(tmp_path: Path, load: Load) -> None:
    models.script(models.Echo(), tmp_path / "model.pt")
    await load(
        config_of("model.pt", X, Y), tmp_path, group=InstanceGroup(kind=InstanceKind.KIND_MODEL)
    )


@pytest.mark.release
@COMPILES
def test_a_compiled_package_for_another_device_is_refused(package: Path) -> None:
    with pytest.raises(InferenceError, match="compiled for cpu, the instance group asks for cuda"):
        load_inductor(package, "cuda:0", 1)


def test_an_exported_program_completes_its_config(tmp_path: Path) -> None:
    models.export_add_sub(tmp_path / "model.pt2", most=3)
    backend = PytorchBackend()
    found = backend.complete(ModelConfig(name="m", platform="torch_aoti"), tmp_path)
    assert [(each.name, each.dims) for each in found.input] == [
        ("INPUT0", (16,)),
        ("INPUT1", (16,)),
    ]
    assert [each.name for each in found.output] == ["OUTPUT__0", "OUTPUT__1"]
    assert found.max_batch_size == 3
    assert found.dynamic_batching is not None


@pytest.mark.parametrize(("default", "size"), [("0", 0), ("1", 1), ("2", 2), ("99", 64)])
def test_the_default_batch_size_is_a_setting(default: str, size: int, tmp_path: Path) -> None:
    models.export_add_sub(tmp_path / "model.pt2")
    backend = PytorchBackend()
    backend.settings = {"default-max-batch-size": default}
    found = backend.complete(ModelConfig(name="m", platform="torch_aoti"), tmp_path)
    assert found.max_batch_size == size
    assert found.input[0].dims == ((16,) if size else (-1, 16))
    assert (found.dynamic_batching is not None) == (size > 1)


def test_tensors_of_the_config_are_kept(tmp_path: Path) -> None:
    models.export_add_sub(tmp_path / "model.pt2")
    whole = config_of("model.pt2", {"a": FP32, "b": FP32}, {"s": FP32})
    assert PytorchBackend().complete(whole, tmp_path) == whole
    inputs = config_of("model.pt2", {"a": FP32, "b": FP32}, {})
    found = PytorchBackend().complete(inputs, tmp_path)
    assert found.input == inputs.input
    assert [each.name for each in found.output] == ["OUTPUT__0", "OUTPUT__1"]


def test_a_program_of_fixed_shape_cannot_batch(tmp_path: Path) -> None:
    models.export(models.Echo(), tmp_path / "model.pt2", torch.zeros(2, 3))
    config = ModelConfig(name="m", platform="torch_aoti")
    found = PytorchBackend().complete(config, tmp_path)
    assert (found.max_batch_size, found.input[0].dims, found.dynamic_batching) == (0, (2, 3), None)
    batching = ModelConfig(name="m", platform="torch_aoti", max_batch_size=4)
    with pytest.raises(
        InferenceError, match="autofill failed for model 'm': model does not support"
    ):
        PytorchBackend().complete(batching, tmp_path)


IMPORTS_NO_MORE = """
import sys
from pathlib import Path
from gateway.backend_loader import BackendLoader
from gateway.config import ModelConfig

def imported():
    return {name for name in sys.modules if name.split(".")[0] == "torch"}

backend = BackendLoader().get("pytorch")
before = imported()
backend.complete(ModelConfig(name="m", platform="torch_aoti"), Path(sys.argv[1]))
print(sorted(imported() - before))
"""


def test_all_of_pytorch_is_imported_when_the_backend_is_created(tmp_path: Path) -> None:
    models.export_add_sub(tmp_path / "model.pt2")
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS_NO_MORE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "[]\n"
