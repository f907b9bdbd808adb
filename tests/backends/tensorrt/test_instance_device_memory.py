"""Tensors in a client's GPU memory: to the plan and back without a trip through the host."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.cuda_driver import DeviceMemory, DeviceRegion
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse, RequestedOutput, SharedRegion
from gateway.tensor import Datatype, Tensor
from tests.backends.tensorrt.conftest import NEGATE, Load, answers, request
from tests.host_gpu import HostGpu

ROW = np.arange(4, dtype="<f4")
COPIES = {"cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost"}


class Client(DeviceRegion):
    """Memory of the stand-in's GPU that a client has registered."""

    gpu = 0

    def __init__(self, world: Any, size: int) -> None:
        self.address = world.allocate(size, 0)
        self.put(0, bytes(size))

    def part(self, offset: int, byte_size: int) -> DeviceMemory:
        return DeviceMemory(0, self.address + offset, byte_size, self)

    def put(self, offset: int, data: bytes) -> DeviceMemory:
        ctypes.memmove(self.address + offset, data, len(data))
        return self.part(offset, len(data))

    def floats(self, offset: int, count: int) -> list[float]:
        data = ctypes.string_at(self.address + offset, 4 * count)
        return list(map(float, np.frombuffer(data, "<f4")))


@pytest.fixture
def client(world: Any, host_gpu: HostGpu) -> Iterator[Client]:
    found = Client(world, 256)
    yield found
    world.free(found.address, 0)


def wanting(x: Tensor, *outputs: RequestedOutput) -> InferRequest:
    return InferRequest(model="m", inputs=(x,), outputs=outputs)


def row(memory: DeviceMemory) -> Tensor:
    return Tensor("x", Datatype.FP32, (1, 4), memory)


def into(client: Client, offset: int, byte_size: int = 16) -> RequestedOutput:
    return RequestedOutput("y", region=SharedRegion("r", byte_size, offset, client))


async def only(load: Any, *requests: InferRequest) -> list[Tensor]:
    found = sorted(await answers(load, *requests), key=lambda answer: answer[0])
    responses = [response for _, response in found]
    assert all(isinstance(each, InferResponse) for each in responses), responses
    return [output for each in responses for output in each.outputs]  # type: ignore[union-attr]


async def test_nothing_passes_the_host_between_two_regions(
    load: Load, world: Any, client: Client
) -> None:
    instance = await load(NEGATE)
    copies = {name: world.calls[name] for name in COPIES}
    given = row(client.put(0, ROW.tobytes()))
    [y] = await only(instance, wanting(given, into(client, 128)))
    assert isinstance(y.data, DeviceMemory)
    assert y.data.address == client.address + 128
    assert client.floats(128, 4) == [-0.0, -1.0, -2.0, -3.0]
    assert {name: world.calls[name] for name in COPIES} == copies
    # What the plan's own memory holds by now does not matter to the client.
    await only(instance, request(x=[[9.0] * 4]))
    assert client.floats(128, 4) == [-0.0, -1.0, -2.0, -3.0]


async def test_either_side_alone_may_be_on_the_gpu(load: Load, client: Client) -> None:
    instance = await load(NEGATE)
    given = row(client.put(16, ROW.tobytes()))
    [y] = await only(instance, wanting(given))
    assert y.array().tolist() == [[-0.0, -1.0, -2.0, -3.0]]
    on_host = replace(request(x=[[1.0] * 4]), outputs=(into(client, 64),))
    await only(instance, on_host)
    assert client.floats(64, 4) == [-1.0] * 4


async def test_an_output_that_does_not_fit_is_refused_by_the_later_check(
    load: Load, client: Client
) -> None:
    instance = await load(NEGATE)
    [y] = await only(instance, wanting(row(client.put(0, ROW.tobytes())), into(client, 64, 8)))
    assert isinstance(y.data, DeviceMemory)
    assert len(y.data) == 16
    assert client.floats(64, 4) == [0.0] * 4


async def test_memory_of_another_gpu_is_copied_by_the_host(
    load: Load, host_gpu: HostGpu, world: Any, client: Client
) -> None:
    instance = await load(NEGATE)
    elsewhere = host_gpu.allocate(ROW.tobytes())
    elsewhere.gpu = 1
    host_gpu.broken = {"cuDeviceGet"}
    with pytest.raises(InferenceError, match="cannot read memory of GPU 1"):
        await answers(instance, wanting(row(elsewhere)))
    assert world.calls["cudaMemcpyDeviceToDevice"] == 0
