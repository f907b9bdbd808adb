"""ONNX models served by Triton's rules, driven by the official clients on both wires."""

import asyncio
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto

from tests.conformance.clients import Client
from tests.onnx_models import add_sub, identity, model, node, one, save, tensor, write
from tests.serving import Serving, serving, write_model

FLAGS = ("--exit-on-error=false", "--strict-readiness=false")
LOADTESTS = Path(__file__).parents[2] / "loadtests" / "models" / "add_sub"

FLOATS = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT64": np.int64,
    "UINT16": np.uint16,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
ELEMENTS = {
    "BOOL": TensorProto.BOOL,
    "INT8": TensorProto.INT8,
    "INT64": TensorProto.INT64,
    "UINT16": TensorProto.UINT16,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}

RAGGED = """
backend: "onnxruntime"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }
output { name: "y" data_type: TYPE_FP32 dims: [-1] }
batch_output { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }
dynamic_batching { max_queue_delay_microseconds: 20000 }
"""
RESHAPED = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [4] reshape { shape: [2, 2] } }
output { name: "y" data_type: TYPE_FP32 dims: [4] reshape { shape: [2, 2] } }
"""
CONTRADICTING = """
input { name: "x" data_type: TYPE_FP32 dims: [3] }
output { name: "y" data_type: TYPE_FP32 dims: [2] }
"""
FAST = 'optimization { execution_accelerators { cpu_execution_accelerator { name: "warp" } } }'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that load and models that do not."""
    folder = tmp_path_factory.mktemp("onnx")
    write(folder, "completed", add_sub())
    shutil.copytree(LOADTESTS, folder / "add_sub")
    for datatype, element in ELEMENTS.items():
        write(folder, f"echo_{datatype.lower()}", identity(element))
    write(folder, "ragged", one("Neg", ("n",)), RAGGED)
    write(folder, "reshaped", transposed(), RESHAPED)
    write(folder, "broadcast", broadcast())
    write(folder, "contradicting", one("Neg"), CONTRADICTING)
    write(folder, "accelerated", one("Neg"), FAST)
    write_model(folder, "junk", 'backend: "onnxruntime"')
    (folder / "junk" / "1" / "model.onnx").write_bytes(b"\xffjunk" * 100)
    write_model(folder, "missing", 'platform: "onnxruntime_onnx"')
    return folder


def transposed() -> Any:
    return model(
        [node("Transpose", "x", "y", perm=[0, 2, 1])],
        [tensor("x", ["b", 2, 2])],
        [tensor("y", ["b", 2, 2])],
    )


def broadcast() -> Any:
    """y = x + z, which fails where their sizes differ."""
    return model(
        [node("Add", "x z", "y", name="/layer/Add")],
        [tensor("x", ["b", "s"]), tensor("z", ["b", "t"])],
        [tensor("y", ["b", "u"])],
    )


async def infer(
    client: Client, name: str, datatype: str = "FP32", *, outputs: Any = None, **values: Any
) -> dict[str, Any]:
    """The outputs of one request."""
    over = tritonclient.http if client.over_http else tritonclient.grpc
    inputs = []
    for key, value in values.items():
        inputs.append(over.InferInput(key, list(value.shape), datatype))
        inputs[-1].set_data_from_numpy(value)
    wanted = [over.InferRequestedOutput(each) for each in outputs] if outputs else None
    found = await client.call("infer", name, inputs, outputs=wanted)
    answer = found.get_response()
    names = [each["name"] if client.over_http else each.name for each in _outputs(answer)]
    return {each: found.as_numpy(each) for each in names}


def _outputs(answer: Any) -> Any:
    return answer["outputs"] if isinstance(answer, Mapping) else answer.outputs


def fp32(*shape: int, value: float = 1) -> Any:
    return np.full(shape, value, dtype=np.float32)


async def test_a_model_without_a_config_shows_what_was_completed(client: Client) -> None:
    config = await client.config("completed")
    assert (config.platform, config.backend) == ("onnxruntime_onnx", "onnxruntime")
    assert config.default_model_filename == "model.onnx"
    assert config.max_batch_size == 4
    assert list(config.dynamic_batching.preferred_batch_size) == [4]
    assert [(each.name, list(each.dims)) for each in config.input] == [
        ("INPUT0", [16]),
        ("INPUT1", [16]),
    ]
    assert [(each.name, list(each.dims)) for each in config.output] == [
        ("OUTPUT0", [16]),
        ("OUTPUT1", [16]),
    ]
    assert [each.count for each in config.instance_group] == [2]
    metadata = await client.metadata("completed")
    assert metadata.platform == "onnxruntime_onnx"
    assert [list(each.shape) for each in metadata.inputs] == [[-1, 16], [-1, 16]]


@pytest.mark.parametrize("name", ["completed", "add_sub"])
@pytest.mark.parametrize("rows", [1, 4])
async def test_sums_and_differences(client: Client, name: str, rows: int) -> None:
    first = np.arange(rows * 16, dtype=np.float32).reshape(rows, 16)
    found = await infer(client, name, INPUT0=first, INPUT1=fp32(rows, 16))
    np.testing.assert_array_equal(found["OUTPUT0"], first + 1)
    np.testing.assert_array_equal(found["OUTPUT1"], first - 1)
    some = await infer(
        client, name, outputs=["OUTPUT1"], INPUT0=first, INPUT1=fp32(rows, 16, value=2)
    )
    assert list(some) == ["OUTPUT1"]
    np.testing.assert_array_equal(some["OUTPUT1"], first - 2)


@pytest.mark.parametrize("datatype", FLOATS)
async def test_every_datatype_is_echoed(client: Client, datatype: str) -> None:
    sent = np.array([[0, 1, 1]], dtype=FLOATS[datatype])
    found = await infer(client, f"echo_{datatype.lower()}", datatype, x=sent)
    np.testing.assert_array_equal(found["y"], sent)
    assert found["y"].dtype == sent.dtype


async def test_strings_are_echoed(client: Client) -> None:
    sent = np.array([[b"a", "\u20ac".encode(), b""]], dtype=object)
    found = await infer(client, "echo_bytes", "BYTES", x=sent)
    assert found["y"].tolist() == sent.tolist()


async def test_a_tensor_without_elements_is_echoed(client: Client) -> None:
    found = await infer(client, "echo_fp32", x=fp32(2, 0))
    assert found["y"].shape == (2, 0)


async def test_requests_of_different_lengths_share_a_ragged_batch(client: Client) -> None:
    lengths = [1, 5, 2, 3]
    if client.wire.endswith("aio"):
        asked = [infer(client, "ragged", x=fp32(1, size, value=size)) for size in lengths]
        found = await asyncio.gather(*asked)
    else:
        found = [await infer(client, "ragged", x=fp32(1, size, value=size)) for size in lengths]
    for size, each in zip(lengths, found, strict=True):
        np.testing.assert_array_equal(each["y"], fp32(1, size, value=-size))


async def test_a_client_sees_the_shape_of_the_config(client: Client) -> None:
    sent = np.array([[1, 2, 3, 4]], dtype=np.float32)
    found = await infer(client, "reshaped", x=sent)
    assert found["y"].tolist() == [[1, 3, 2, 4]]


async def test_a_failure_of_the_model_is_sent_and_the_next_request_is_answered(
    client: Client,
) -> None:
    over = tritonclient.http if client.over_http else tritonclient.grpc
    inputs = []
    for name, size in (("x", 2), ("z", 3)):
        inputs.append(over.InferInput(name, [1, size], "FP32"))
        inputs[-1].set_data_from_numpy(fp32(1, size))
    code, text = await client.refusal("infer", "broadcast", inputs)
    assert code == client.code("INTERNAL")
    assert text.startswith("model 'broadcast' failed: onnx runtime error 1: Non-zero status code")
    assert "2 by 3" in text
    assert "/onnxruntime_src" not in text
    found = await infer(client, "broadcast", x=fp32(1, 2), z=fp32(1, 2))
    assert found["y"].tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "contradicting",
            "model 'contradicting', tensor 'x': the model expects 1 dimensions (shape [2]) but the "
            "model configuration specifies 1 dimensions (shape [3])",
        ),
        ("accelerated", "unknown Execution Accelerator 'warp' is requested"),
        (
            "junk",
            "unable to load model 'junk': onnx runtime error 7: Load model from model.onnx "
            "failed:Protobuf parsing failed.",
        ),
        ("missing", "unable to find '1/model.onnx' for model instance 'missing'"),
    ],
)
async def test_a_model_that_does_not_load_says_why(
    client: Client, server: Serving, repository: Path, name: str, reason: str
) -> None:
    assert not await client.call("is_model_ready", name)
    lines = [line for line in server.every_line if f"model={name} " in line]
    assert any(reason in line for line in server.every_line)
    assert not any(str(repository) in line for line in lines)


def test_more_instances_than_cores_of_one_pool_answer_all(tmp_path: Path) -> None:
    write(tmp_path, "echo", identity(), "instance_group { count: 3 kind: KIND_CPU }")
    save(identity(), tmp_path / "echo" / "1")
    flags = (
        "--backend-config=onnxruntime,enable-global-threadpool=1",
        "--backend-config=onnxruntime,intra_op_thread_count=2",
        "--backend-config=onnxruntime,default-max-batch-size=3",
    )
    with (
        serving(tmp_path, *flags) as server,
        tritonclient.grpc.InferenceServerClient(server.grpc) as client,
    ):
        assert client.get_model_config("echo").config.max_batch_size == 3
        sent = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
        sent.set_data_from_numpy(fp32(1, 4))
        with ThreadPoolExecutor(6) as threads:
            calls = list(threads.map(lambda _: client.infer("echo", [sent]), range(24)))
    assert all(each.as_numpy("y").tolist() == [[1, 1, 1, 1]] for each in calls)
