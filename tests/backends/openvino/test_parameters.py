"""Parameters of OpenVINO models are read as Triton reads them."""

from pathlib import Path

import pytest

from backends.openvino.parameters import OpenVinoParameters
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.process_limits import processors


def config_of(count: int = 1, **parameters: str) -> ModelConfig:
    group = InstanceGroup(kind=InstanceKind.KIND_CPU, count=count)
    return ModelConfig(name="m", parameters=parameters, instance_group=(group,))


def read(folder: Path, *, count: int = 1, **parameters: str) -> OpenVinoParameters:
    return OpenVinoParameters.read(config_of(count, **parameters), folder)


def test_instances_compute_side_by_side_in_float32(folder: Path) -> None:
    found = read(folder, count=3)
    assert (found.device, found.reshapes, found.extension) == ("CPU", False, None)
    assert found.properties == {
        "NUM_STREAMS": "3",
        "INFERENCE_NUM_THREADS": processors(),
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
    }


@pytest.mark.parametrize(("given", "threads"), [("7", 3), ("1", 1)])
def test_an_instance_of_its_own_has_its_part_of_the_threads(
    folder: Path, given: str, threads: int
) -> None:
    config = config_of(2, NUM_STREAMS="AUTO", INFERENCE_NUM_THREADS=given)
    found = OpenVinoParameters.read(config, folder).of_one_instance(config)
    assert (found["NUM_STREAMS"], found["INFERENCE_NUM_THREADS"]) == ("1", threads)


def test_keys_and_values_are_read_in_any_case(folder: Path) -> None:
    found = read(
        folder,
        num_streams="auto",
        PERFORMANCE_HINT="latency",
        INFERENCE_NUM_THREADS="2",
        COMPILATION_NUM_THREADS="1",
        HINT_BF16="yes",
        RESHAPE_IO_LAYERS="yes",
        ENABLE_BATCH_PADDING="YES",
        SKIP_OV_DYNAMIC_BATCHSIZE="YES",
    )
    assert found.reshapes
    assert found.properties == {
        "NUM_STREAMS": "AUTO",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": 2,
        "COMPILATION_NUM_THREADS": 1,
        "INFERENCE_PRECISION_HINT": "bf16",
        "ENABLE_CPU_PINNING": False,
    }


def test_other_devices_get_only_the_given_properties(folder: Path) -> None:
    found = read(folder, TARGET_DEVICE="gpu", PERFORMANCE_HINT="THROUGHPUT")
    assert (found.device, found.properties) == ("GPU", {"PERFORMANCE_HINT": "THROUGHPUT"})


@pytest.mark.parametrize(
    "device",
    [
        "auto",
        "AUTO:CPU",
        "AUTO:-GPU",
        "MULTI:GPU,CPU",
        "MULTI:CPU(2)",
        "HETERO:CPU",
        "BATCH:CPU(4)",
    ],
)
def test_devices_that_may_be_the_cpu_compute_in_float32(folder: Path, device: str) -> None:
    precision = "INFERENCE_PRECISION_HINT"
    assert read(folder, TARGET_DEVICE=device).properties == {precision: "f32"}
    asked = read(folder, TARGET_DEVICE=device, HINT_BF16="YES")
    assert asked.properties == {precision: "bf16"}


@pytest.mark.parametrize(
    "device", ["AUTO:-CPU", "AUTO:GPU", "AUTO:GPU,-CPU", "HETERO:GPU.1", "NPU"]
)
def test_the_precision_of_other_devices_is_the_librarys(folder: Path, device: str) -> None:
    assert read(folder, TARGET_DEVICE=device).properties == {}


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("NUM_STREAMS", "Many", "either AUTO/NUMA/<int_value>, got many"),
        ("NUM_STREAMS", "-1", "either AUTO/NUMA/<int_value>, got -1"),
        ("PERFORMANCE_HINT", "FAST", "LATENCY/THROUGHPUT/CUMULATIVE_THROUGHPUT, got fast"),
        ("INFERENCE_NUM_THREADS", "-2", "a non-negative number, got -2"),
        ("COMPILATION_NUM_THREADS", "Two", "a non-negative number, got two"),
        ("HINT_BF16", "No", "YES, got no"),
    ],
)
def test_other_values_are_refused_with_tritons_texts(
    folder: Path, key: str, text: str, expected: str
) -> None:
    with pytest.raises(InferenceError) as refused:
        read(folder, **{key: text})
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message == f"expected the parameter '{key}' to be {expected}"


@pytest.mark.parametrize("key", ["NUM_STREAMS", "INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS"])
@pytest.mark.parametrize("digits", [10, 30, 5000])
def test_numbers_too_large_for_the_library_are_refused(folder: Path, key: str, digits: int) -> None:
    with pytest.raises(InferenceError) as refused:
        read(folder, **{key: "9" * digits})
    assert refused.value.code is Code.INVALID_ARG
    assert f"parameter '{key}'" in refused.value.message


@pytest.mark.parametrize("name", ["/usr/lib/libc.so.6", "../../other.so"])
def test_an_extension_is_a_file_of_the_model(folder: Path, name: str) -> None:
    assert read(folder, CPU_EXTENSION_PATH="../own.so").extension == folder.parent / "own.so"
    with pytest.raises(InferenceError, match="outside of the model's folder"):
        read(folder, CPU_EXTENSION_PATH=name)
