"""GPU memory of clients, without a driver and with a fake one in host memory."""

import gc

import pytest

from gateway.cuda_driver import DeviceMemory
from gateway.errors import Code, InferenceError
from gateway.messages import SharedRegion
from gateway.shared_memory import cuda as cuda_region
from gateway.shared_memory.cuda import HANDLE_BYTES, open_cuda
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Datatype, Tensor, join_elements
from tests.host_gpu import HostGpu

HANDLE = bytes(range(HANDLE_BYTES))
CONTENT = bytes(range(64))


@pytest.fixture
def memory(host_gpu: HostGpu) -> DeviceMemory:
    """The memory of the handle: 64 bytes, and no more."""
    found = host_gpu.allocate(CONTENT)
    host_gpu.share(HANDLE, found)
    return found


@pytest.fixture
def regions(memory: DeviceMemory) -> SharedMemory:
    """A region `r` of the 64 bytes."""
    found = SharedMemory(allowed=True)
    found.register_cuda("r", HANDLE, 0, 64)
    return found


def refusal(handle: bytes = HANDLE, device_id: int = 0, byte_size: int = 64) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        open_cuda("r", handle, device_id, byte_size)
    return caught.value.code, caught.value.message


# Regions.


def test_without_a_gpu_there_is_no_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_region, "load_driver", lambda: None)
    assert refusal() == (
        Code.INVALID_ARG,
        "failed to register CUDA shared memory region: 'r', GPUs not supported",
    )


@pytest.mark.parametrize("handle", [b"", b"x", bytes(HANDLE_BYTES + 1)])
def test_a_handle_has_its_size(memory: DeviceMemory, handle: bytes) -> None:
    text = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
    assert refusal(handle) == (Code.INVALID_ARG, text)


def test_a_region_is_closed_with_its_last_use(host_gpu: HostGpu, memory: DeviceMemory) -> None:
    region = open_cuda("r", HANDLE, 0, 64)
    assert (region.name, region.device_id, region.byte_size) == ("r", 0, 64)
    part = region.part(8, 4)
    del region
    gc.collect()
    assert host_gpu.closed == []
    del part
    gc.collect()
    assert host_gpu.closed == [memory.address]


@pytest.mark.parametrize("byte_size", [0, 65, 2**64 - 1])
def test_a_region_lies_inside_the_allocation(
    host_gpu: HostGpu, memory: DeviceMemory, byte_size: int
) -> None:
    text = "failed to register shared memory region 'r': invalid args"
    assert refusal(byte_size=byte_size) == (Code.INVALID_ARG, text)
    gc.collect()
    assert host_gpu.closed == [memory.address]


def test_a_device_that_does_not_exist_is_refused(memory: DeviceMemory) -> None:
    code, text = refusal(device_id=3)
    assert code is Code.INVALID_ARG
    assert "of device 3: cuDeviceGet failed with CUDA error 101" in text


def test_a_handle_that_leads_nowhere_is_refused(memory: DeviceMemory) -> None:
    code, text = refusal(bytes(HANDLE_BYTES))
    assert code is Code.INVALID_ARG
    assert "cuIpcOpenMemHandle_v2 failed with CUDA error 400" in text


# Tensors in them.


def test_numbers_stay_on_the_gpu_until_they_are_read(
    host_gpu: HostGpu, regions: SharedMemory, memory: DeviceMemory
) -> None:
    data = regions.read(SharedRegion("r", 8, 4), Datatype.INT32)
    assert isinstance(data, DeviceMemory)
    assert (data.gpu, data.address, len(data)) == (0, memory.address + 4, 8)
    assert "cuMemcpyDtoH_v2" not in host_gpu.calls
    tensor = Tensor("x", Datatype.INT32, (2,), data)
    assert bytes(tensor.raw()) == CONTENT[4:12]
    assert memoryview(tensor.raw()).readonly
    assert tensor.array().tolist() == [0x07060504, 0x0B0A0908]


def test_text_is_read_at_once(host_gpu: HostGpu) -> None:
    text = join_elements([b"one", b"two"])
    host_gpu.share(HANDLE, host_gpu.allocate(text))
    regions = SharedMemory(allowed=True)
    regions.register_cuda("r", HANDLE, 0, len(text))
    data = regions.read(SharedRegion("r", len(text)), Datatype.BYTES)
    assert not isinstance(data, DeviceMemory)
    assert Tensor("x", Datatype.BYTES, (2,), data).elements() == (b"one", b"two")


def test_outputs_from_the_host_are_copied_to_the_gpu(
    regions: SharedMemory, memory: DeviceMemory
) -> None:
    regions.write(SharedRegion("r", 4, 60), Tensor("y", Datatype.UINT8, (4,), b"last"))
    assert bytes(memory.read()) == CONTENT[:60] + b"last"


def test_an_input_that_a_model_returns_is_copied_to_its_region(
    host_gpu: HostGpu, regions: SharedMemory, memory: DeviceMemory
) -> None:
    given = host_gpu.allocate(b"last")
    regions.write(SharedRegion("r", 4, 60), Tensor("y", Datatype.UINT8, (4,), given))
    assert host_gpu.calls.keys() & {"cuMemcpyDtoH_v2", "cuMemcpyHtoDAsync_v2"} == set()
    assert bytes(memory.read()) == CONTENT[:60] + b"last"


def test_an_input_that_a_model_returns_is_copied_to_a_region_of_another_gpu(
    host_gpu: HostGpu, regions: SharedMemory, memory: DeviceMemory
) -> None:
    given = host_gpu.allocate(b"last")
    located = regions.locate(SharedRegion("r", 4, 60))
    assert isinstance(located.memory, cuda_region.CudaRegion)
    located.memory.gpu = 1
    regions.write(located, Tensor("y", Datatype.UINT8, (4,), given))
    assert bytes(memory.read()) == CONTENT[:60] + b"last"


def test_an_output_that_is_in_its_region_is_not_copied(
    host_gpu: HostGpu, regions: SharedMemory
) -> None:
    there = regions.read(SharedRegion("r", 4, 60), Datatype.UINT8)
    regions.write(SharedRegion("r", 4, 60), Tensor("y", Datatype.UINT8, (4,), there))
    copies = {"cuMemcpyDtoH_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2"}
    assert host_gpu.calls.keys() & copies == set()


def test_an_output_that_is_too_large_is_refused_wherever_it_lies(
    host_gpu: HostGpu, regions: SharedMemory
) -> None:
    for data in (bytes(5), host_gpu.allocate(bytes(5))):
        with pytest.raises(InferenceError) as caught:
            regions.write(SharedRegion("r", 4), Tensor("y", Datatype.UINT8, (5,), data))
        assert caught.value.code is Code.INTERNAL
        assert "(4 bytes) should be at least 5 bytes" in caught.value.message


def test_the_error_of_a_gpu_is_reported(host_gpu: HostGpu, regions: SharedMemory) -> None:
    host_gpu.broken = {"cuMemcpyDtoH_v2", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"}
    data = regions.read(SharedRegion("r", 8), Datatype.INT32)
    assert isinstance(data, DeviceMemory)
    tries = {
        "cannot read memory of GPU 0: cuMemcpyDtoH_v2": data.read,
        "cannot write memory of GPU 0: cuStreamSynchronize": lambda: data.take(data),
        "cannot write CUDA shared memory region 'r': cuMemcpyHtoDAsync_v2": lambda: regions.write(
            SharedRegion("r", 4), Tensor("y", Datatype.UINT8, (4,), b"last")
        ),
    }
    for text, attempt in tries.items():
        with pytest.raises(InferenceError) as caught:
            attempt()
        expected = (Code.INTERNAL, f"{text} failed with CUDA error 999")
        assert (caught.value.code, caught.value.message) == expected
