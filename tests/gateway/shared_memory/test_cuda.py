"""GPU memory of clients, through a driver that is not there, or one that a test plays."""

import ctypes
import gc
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.shared_memory import cuda as cuda_region
from gateway.shared_memory.cuda import HANDLE_BYTES, open_cuda

HANDLE = bytes(range(HANDLE_BYTES))
BASE = 0x1000


def put(reference: Any, value: int) -> None:
    """Write a number where a reference leads, as C does."""
    ctypes.cast(reference, ctypes.POINTER(ctypes.c_uint64)).contents.value = value


class Driver:
    """The CUDA driver of a machine with one GPU whose memory is `memory`."""

    def __init__(self, memory: bytes) -> None:
        self.memory = bytearray(memory)
        self.closed: list[int] = []

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        return 0 if ordinal.value == 0 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        if bytes(handle) != HANDLE:
            return 400
        put(address, BASE)
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        self.closed.append(address.value)
        return 0

    def cuMemGetAddressRange_v2(self, start: Any, size: Any, address: Any) -> int:
        put(start, BASE)
        put(size, len(self.memory))
        return 0

    def cuMemcpyDtoH_v2(self, data: Any, address: Any, size: Any) -> int:
        start = address.value - BASE
        ctypes.memmove(data, bytes(self.memory[start : start + size.value]), size.value)
        return 0

    def cuMemcpyHtoD_v2(self, address: Any, data: bytes, size: Any) -> int:
        start = address.value - BASE
        self.memory[start : start + size.value] = data
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver(bytes(range(64)))
    monkeypatch.setattr(cuda_region, "load_driver", lambda: found)
    return found


def refusal(handle: bytes = HANDLE, device_id: int = 0, byte_size: int = 64) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        open_cuda("r", handle, device_id, byte_size)
    return caught.value.code, caught.value.message


def test_without_a_gpu_there_is_no_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_region, "load_driver", lambda: None)
    assert refusal() == (
        Code.INVALID_ARG,
        "failed to register CUDA shared memory region: 'r', GPUs not supported",
    )


@pytest.mark.parametrize("handle", [b"", b"x", bytes(HANDLE_BYTES + 1)])
def test_a_handle_has_its_size(driver: Driver, handle: bytes) -> None:
    text = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
    assert refusal(handle) == (Code.INVALID_ARG, text)


def test_tensors_are_copied_from_and_to_the_gpu(driver: Driver) -> None:
    region = open_cuda("r", HANDLE, 0, 64)
    assert (region.name, region.device_id, region.byte_size) == ("r", 0, 64)
    assert bytes(region.read(8, 4)) == bytes([8, 9, 10, 11])
    assert region.read(8, 4).readonly
    region.write(60, memoryview(b"last"))
    assert driver.memory[60:] == b"last"


def test_a_region_is_closed_with_its_last_use(driver: Driver) -> None:
    region = open_cuda("r", HANDLE, 0, 64)
    assert driver.closed == []
    del region
    gc.collect()
    assert driver.closed == [BASE]


@pytest.mark.parametrize("byte_size", [0, 65, 2**64 - 1])
def test_a_region_lies_inside_what_was_allocated(driver: Driver, byte_size: int) -> None:
    text = "failed to register shared memory region 'r': invalid args"
    assert refusal(byte_size=byte_size) == (Code.INVALID_ARG, text)
    gc.collect()
    assert driver.closed == [BASE]


def test_a_device_that_does_not_exist_is_refused(driver: Driver) -> None:
    code, text = refusal(device_id=3)
    assert code is Code.INVALID_ARG
    assert "of device 3: cuDeviceGet failed with CUDA error 101" in text


def test_a_handle_that_leads_nowhere_is_refused(driver: Driver) -> None:
    code, text = refusal(bytes(HANDLE_BYTES))
    assert code is Code.INVALID_ARG
    assert "cuIpcOpenMemHandle_v2 failed with CUDA error 400" in text
