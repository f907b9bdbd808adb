"""Outputs go from one place on the GPU to the other; nothing passes the host on the way."""

from dataclasses import replace

import pytest

from gateway.cuda_driver import DeviceMemory
from gateway.messages import InferRequest, RequestedOutput, SharedRegion
from gateway.tensor import Datatype, Tensor
from gateway.tensor_runtime.device_outputs import delivered, staying
from tests.host_gpu import HostGpu, Region


def wanting(*outputs: RequestedOutput) -> InferRequest:
    return InferRequest(model="m", inputs=(), outputs=outputs)


def in_region(name: str, memory: object, byte_size: int = 4, offset: int = 2) -> RequestedOutput:
    return RequestedOutput(name, region=SharedRegion("r", byte_size, offset, memory))


def test_outputs_requested_on_the_gpu_stay_there(host_gpu: HostGpu) -> None:
    here = Region(host_gpu.allocate(bytes(8)))
    elsewhere = Region(host_gpu.allocate(bytes(8)), gpu=1)
    request = wanting(
        in_region("here", here),
        in_region("elsewhere", elsewhere),
        in_region("host", object()),
        replace(in_region("classes", here), classes=3),
        RequestedOutput("plain"),
    )
    assert staying(0, [request]) == {"here"}
    assert staying(1, [request]) == {"elsewhere"}
    assert staying(None, [request]) == set()
    assert staying(0, [request, request]) == set()
    assert staying(0, [wanting()]) == set()


def test_it_is_copied_within_the_gpu(host_gpu: HostGpu) -> None:
    region = Region(host_gpu.allocate(bytes(8)))
    made = Tensor("y", Datatype.UINT8, (4,), host_gpu.allocate(b"made"))
    plain = Tensor("z", Datatype.UINT8, (1,), b"z")
    found = delivered({"y": made, "z": plain}, {"y"}, wanting(in_region("y", region)))
    assert found["z"] is plain
    data = found["y"].data
    assert isinstance(data, DeviceMemory)
    assert data.address == region.memory.address + 2
    assert host_gpu.calls.keys() & {"cuMemcpyDtoH_v2", "cuMemcpyHtoDAsync_v2"} == set()
    assert bytes(region.memory.read()) == b"\0\0made\0\0"


@pytest.mark.parametrize("data", ["large", "host"])
def test_outputs_that_do_not_fit_or_are_on_the_host_are_unchanged(
    host_gpu: HostGpu, data: str
) -> None:
    region = Region(host_gpu.allocate(bytes(8)))
    content = host_gpu.allocate(b"large") if data == "large" else b"host"
    made = Tensor("y", Datatype.UINT8, (len(content),), content)
    assert delivered({"y": made}, {"y"}, wanting(in_region("y", region)))["y"] is made
    assert bytes(region.memory.read()) == bytes(8)
