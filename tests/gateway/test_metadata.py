"""Metadata and statistics of the server and its models."""

from dataclasses import replace

import pytest

import gateway
from gateway.backend import Instance
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.metadata import model_metadata, model_ready, server_metadata, statistics
from gateway.models.instance_groups import InstanceSlot
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from tests.builders import TEXT, LoadedModels, ScriptedInstance, soon
from tests.conftest import Serve

ADD = ModelConfig(
    name="add",
    platform="onnxruntime_onnx",
    backend="onnxruntime",
    max_batch_size=8,
    input=(
        ModelInput(name="B", data_type=DataType.TYPE_STRING, dims=(-1, 2)),
        ModelInput(name="A", data_type=DataType.TYPE_FP32, dims=(4,), optional=True),
    ),
    output=(ModelOutput(name="S", data_type=DataType.TYPE_BF16, dims=()),),
)


async def _no_load() -> Instance:
    raise AssertionError("nothing is loaded here")


def loaded(config: ModelConfig, version: int = 1, instance: Instance | None = None) -> Model:
    """A model that takes no requests."""
    instances = [instance or ScriptedInstance()]
    slots = [InstanceSlot(_no_load, instance=instance) for instance in instances]
    return Model(config, version, ModelStatistics(), slots)


def over(*models: Model) -> DataPlane:
    return DataPlane(LoadedModels(*models))  # type: ignore[arg-type]


def test_a_server_has_a_name_a_version_and_extensions() -> None:
    found = server_metadata("gpu-7")
    assert found["name"] == "gpu-7"
    assert found["version"] == gateway.__version__
    assert set(found["extensions"]) >= {"model_configuration", "statistics", "parameters"}


async def test_metadata_has_the_tensors_in_the_order_of_the_config() -> None:
    assert model_metadata(over(loaded(ADD)), "add", "") == {
        "name": "add",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [
            {"name": "B", "datatype": "BYTES", "shape": [-1, -1, 2]},
            {"name": "A", "datatype": "FP32", "shape": [-1, 4]},
        ],
        "outputs": [{"name": "S", "datatype": "BF16", "shape": [-1]}],
    }


async def test_without_batching_the_shapes_are_the_dims() -> None:
    found = model_metadata(over(loaded(replace(ADD, max_batch_size=0))), "add", "")
    assert [each["shape"] for each in found["inputs"]] == [[-1, 2], [4]]
    assert found["outputs"][0]["shape"] == []


async def test_metadata_has_the_backend_of_a_model_without_a_platform() -> None:
    found = model_metadata(over(loaded(replace(ADD, platform=""))), "add", "")
    assert found["platform"] == "onnxruntime"


async def test_metadata_lists_the_ready_versions_unless_one_is_requested() -> None:
    dataplane = over(*(loaded(ADD, version) for version in (1, 3, 10)))
    assert model_metadata(dataplane, "add", "")["versions"] == ["1", "3", "10"]
    assert model_metadata(dataplane, "add", "3")["versions"] == ["3"]


@pytest.mark.parametrize(("name", "version"), [("nope", ""), ("add", "7")])
async def test_an_unknown_model_has_no_metadata(name: str, version: str) -> None:
    with pytest.raises(InferenceError) as caught:
        model_metadata(over(loaded(ADD)), name, version)
    assert caught.value.code is Code.NOT_FOUND


# Statistics.


def rows(dataplane: DataPlane, name: str = "", version: str = "") -> list[tuple[str, str]]:
    return [(row["name"], row["version"]) for row in statistics(dataplane, name, version)]


async def test_there_is_a_row_for_each_ready_version_that_is_asked_for(serve: Serve) -> None:
    dead = ScriptedInstance()
    never = {"restart_tries": "0"}
    gone = serve(dead, config=replace(TEXT, name="dead", parameters=never))
    dataplane = over(loaded(ADD, 1), loaded(ADD, 2), loaded(TEXT, 1), gone)
    dead.die("killed")
    await soon(dead.closed.wait())
    assert rows(dataplane) == [("add", "1"), ("add", "2"), ("text", "1")]
    assert rows(dataplane, "add") == [("add", "1"), ("add", "2")]
    assert rows(dataplane, "add", "2") == [("add", "2")]


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("nope", "", "requested model 'nope' is not available"),
        ("nope", "1", "requested model 'nope' is not available"),
        ("add", "7", "requested model version is not available for model 'add'"),
    ],
)
async def test_statistics_of_what_is_unknown_are_an_invalid_argument(
    name: str, version: str, text: str
) -> None:
    with pytest.raises(InferenceError) as caught:
        statistics(over(loaded(ADD)), name, version)
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, text)


async def test_without_models_there_are_no_rows() -> None:
    assert rows(over()) == []


# Readiness.


class BadVersions(LoadedModels):
    """A registry that is asked for a version that is no number."""

    def find(self, name: str, version: str) -> Model:
        raise InferenceError(Code.INVALID_ARG, "version should be an integral value > 0")


async def test_a_model_is_ready_or_not_and_what_is_unknown_is_not() -> None:
    dataplane = over(loaded(ADD))
    assert model_ready(dataplane, "add", "")
    assert model_ready(dataplane, "add", "1")
    assert not model_ready(dataplane, "add", "7")
    assert not model_ready(dataplane, "nope", "")


async def test_a_version_that_is_no_number_is_refused() -> None:
    with pytest.raises(InferenceError, match="integral value"):
        model_ready(DataPlane(BadVersions()), "add", "abc")  # type: ignore[arg-type]
