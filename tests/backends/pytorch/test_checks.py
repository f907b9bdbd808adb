"""Configs from files, and their gaps."""

from pathlib import Path

import pytest
import torch

from backends.pytorch.backend import PytorchBackend
from backends.pytorch.checks import NOT_TOLD
from gateway.backend import Description
from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.errors import InferenceError
from gateway.models.config_checks import check_tensors
from tests import torch_models as models
from tests.torch_models import COMPILES

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

FP32 = DataType.TYPE_FP32


def describe(path: Path) -> Description:
    config = ModelConfig(name="m", backend="pytorch", default_model_filename=path.name)
    return PytorchBackend().describe(config, path.parent)


@pytest.mark.release
@COMPILES
def test_a_compiled_package_is_described_by_its_source_and_a_run(package: Path) -> None:
    found = describe(package)
    assert [(i.name, i.data_type, i.dims) for i in found.config.input] == [
        ("INPUT__0", FP32, (16,)),
        ("INPUT__1", FP32, (16,)),
    ]
    assert [(o.name, o.data_type, o.dims) for o in found.config.output] == [
        ("OUTPUT__0", FP32, (16,)),
        ("OUTPUT__1", FP32, (16,)),
    ]
    assert found.config.max_batch_size == 4
    assert found.notes == {}
    check_tensors(found.config)


def test_a_traced_module_is_described_by_its_example(tmp_path: Path) -> None:
    path = models.trace(models.AddSub(), tmp_path / "m.pt", torch.ones(1, 16), torch.ones(1, 16))
    found = describe(path)
    assert [(i.name, i.data_type, i.dims) for i in found.config.input] == [
        ("INPUT0", FP32, (16,)),
        ("INPUT1", FP32, (16,)),
    ]
    assert found.config.output[1].name == "OUTPUT__1"
    assert found.config.max_batch_size == 4
    assert found.notes["INPUT0"] == "traced with shape [1,16]"
    check_tensors(found.config)


def test_a_traced_module_that_insists_on_its_shape_does_not_batch(tmp_path: Path) -> None:
    path = models.trace(models.Linear(), tmp_path / "m.pt", torch.ones(3))
    found = describe(path)
    assert found.config.max_batch_size == 0
    assert found.config.input[0].dims == (3,)
    assert found.config.output[0].dims == (2,)


def test_a_scripted_module_tells_names_only(tmp_path: Path) -> None:
    found = describe(models.script(models.AddSub(), tmp_path / "m.pt"))
    assert [each.name for each in found.config.input] == ["INPUT0", "INPUT1"]
    assert [each.name for each in found.config.output] == ["OUTPUT__0", "OUTPUT__1"]
    assert found.notes == dict.fromkeys(["INPUT0", "INPUT1", "OUTPUT__0", "OUTPUT__1"], NOT_TOLD)
    with pytest.raises(InferenceError, match="'INPUT0' must specify 'data_type'"):
        check_tensors(found.config)


@pytest.mark.parametrize("module", [models.Keyed(), models.Listed()])
def test_a_module_of_a_dict_or_a_list_does_not_even_tell_names(
    module: torch.nn.Module, tmp_path: Path
) -> None:
    found = describe(models.script(module, tmp_path / "m.pt"))
    assert (found.config.input, found.config.output) == ((), ())


def test_arguments_with_defaults_are_omitted(tmp_path: Path) -> None:
    found = describe(models.script(models.Choosy(), tmp_path / "m.pt"))
    assert [each.name for each in found.config.input] == ["x"]


def test_a_tensor_that_is_only_a_batch_has_one_dimension_and_an_empty_reshape(
    tmp_path: Path,
) -> None:
    batch = torch.export.Dim("batch", min=1, max=8)
    shapes = {"x": {0: batch}}
    path = models.export(models.Echo(), tmp_path / "m.pt2", torch.zeros(2), dynamic_shapes=shapes)
    found = describe(path).config
    assert found.input[0].dims == (1,)
    assert found.input[0].reshape is not None
    assert found.input[0].reshape.shape == ()
    check_tensors(found)
