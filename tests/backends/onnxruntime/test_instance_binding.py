"""Tensors that lie on a GPU, and outputs that stay there: the GPU has memory of the host here.

ONNX Runtime gets the CPU as the place, so it does with the addresses what it would there.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto
from onnxruntime import InferenceSession

from backends.onnxruntime.instance import GpuPlace, OnnxRuntimeInstance, gpu_place
from backends.onnxruntime.model_file import signature
from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.cuda_driver import DeviceMemory
from gateway.messages import InferRequest, InferResponse, RequestedOutput, SharedRegion
from gateway.tensor import Datatype, Tensor, array_tensor
from tests.host_gpu import HostGpu, Region
from tests.onnx_models import add_sub, identity
from tests.tensor_backends import Load, answers, context

Array = npt.NDArray[Any]
A, B = np.arange(16, dtype="<f4").reshape(1, 16), np.full((1, 16), 3, dtype="<f4")


def lying(host_gpu: HostGpu, name: str, array: Array) -> Tensor:
    """A tensor of FP32 in memory of the GPU."""
    return Tensor(name, Datatype.FP32, array.shape, host_gpu.allocate(array.tobytes()))


def into(region: Region, name: str) -> RequestedOutput:
    size = len(region.memory)
    return RequestedOutput(name, region=SharedRegion("r", size, 0, region))


async def placed(load: Load, model: Any) -> OnnxRuntimeInstance:
    """An instance that believes to be on GPU 0."""
    instance = await load(model)
    assert isinstance(instance, OnnxRuntimeInstance)
    instance.gpu = 0
    instance.place = GpuPlace("cpu", 0)
    return instance


async def outputs(instance: OnnxRuntimeInstance, request: InferRequest) -> dict[str, Tensor]:
    [(_, response)] = await answers(instance, request)
    assert isinstance(response, InferResponse), response
    return {each.name: each for each in response.outputs}


async def test_nothing_passes_the_host_between_two_regions(load: Load, host_gpu: HostGpu) -> None:
    instance = await placed(load, add_sub())
    region = Region(host_gpu.allocate(bytes(64)))
    request = InferRequest(
        model="m",
        inputs=(lying(host_gpu, "INPUT0", A), lying(host_gpu, "INPUT1", B)),
        outputs=(into(region, "OUTPUT0"),),
    )
    found = await outputs(instance, request)
    assert isinstance(found["OUTPUT0"].data, DeviceMemory)
    assert found["OUTPUT0"].data.address == region.memory.address
    assert host_gpu.calls.keys() & {"cuMemcpyDtoH_v2", "cuMemcpyHtoDAsync_v2"} == set()
    assert np.array_equal(np.frombuffer(region.memory.read(), "<f4"), (A + B)[0])


async def test_inputs_and_outputs_may_be_on_either_side(load: Load, host_gpu: HostGpu) -> None:
    instance = await placed(load, add_sub())
    region = Region(host_gpu.allocate(bytes(64)))
    request = InferRequest(
        model="m",
        inputs=(array_tensor("INPUT0", Datatype.FP32, A), lying(host_gpu, "INPUT1", B)),
        outputs=(into(region, "OUTPUT1"), RequestedOutput("OUTPUT0")),
    )
    found = await outputs(instance, request)
    assert np.array_equal(found["OUTPUT0"].array(), A + B)
    assert not isinstance(found["OUTPUT0"].data, DeviceMemory)
    assert np.array_equal(np.frombuffer(region.memory.read(), "<f4"), (A - B)[0])


@pytest.mark.parametrize("align", [4, 1])
async def test_unaligned_memory_is_copied_by_the_host(
    load: Load, host_gpu: HostGpu, align: int
) -> None:
    first = host_gpu.allocate(A.tobytes())
    odd = DeviceMemory(0, first.address + align, 60, first)
    given = Tensor("INPUT0", Datatype.FP32, (1, 15), odd)
    request = InferRequest(
        model="m", inputs=(given, array_tensor("INPUT1", Datatype.FP32, B[:, :15]))
    )
    instance = await placed(load, add_sub(("batch", "size")))
    expected = np.frombuffer(A.tobytes()[align : align + 60], "<f4") + 3
    assert np.array_equal((await outputs(instance, request))["OUTPUT0"].array()[0], expected)
    assert host_gpu.calls["cuMemcpyDtoH_v2"] == 1


async def test_truth_values_are_ones_and_zeros(load: Load, host_gpu: HostGpu) -> None:
    instance = await placed(load, identity(TensorProto.BOOL))
    there = host_gpu.allocate(bytes([0, 1, 2, 255]))
    request = InferRequest(model="m", inputs=(Tensor("x", Datatype.BOOL, (1, 4), there),))
    found = await outputs(instance, request)
    assert found["y"].array().view(np.uint8).tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("element", "kind", "place"),
    [
        (TensorProto.FLOAT, InstanceKind.KIND_GPU, GpuPlace("cuda", 3)),
        (TensorProto.FLOAT, InstanceKind.KIND_CPU, None),
        (TensorProto.STRING, InstanceKind.KIND_GPU, None),  # the runtime cannot bind them
    ],
)
async def test_numbers_of_models_on_a_gpu_can_be_bound(
    load: Load, folder: Path, element: int, kind: InstanceKind, place: GpuPlace | None
) -> None:
    await load(identity(element))
    session = InferenceSession(folder / "model.onnx")
    there = replace(context(ModelConfig(name="m"), folder, InstanceGroup(kind=kind)), device=3)
    assert gpu_place(there, signature(session)) == place


async def test_two_requests_are_one_batch_wherever_their_data_lies(
    load: Load, host_gpu: HostGpu
) -> None:
    instance = await placed(load, add_sub())
    regions = [Region(host_gpu.allocate(bytes(64))) for _ in range(2)]
    requests = [
        InferRequest(
            model="m",
            inputs=(lying(host_gpu, "INPUT0", A * n), lying(host_gpu, "INPUT1", B)),
            outputs=(into(region, "OUTPUT0"),),
        )
        for n, region in enumerate(regions)
    ]
    found = sorted(await answers(instance, *requests), key=lambda answer: answer[0])
    for number, (_, response) in enumerate(found):
        assert isinstance(response, InferResponse), response
        assert np.array_equal(response.outputs[0].array(), A * number + B)
