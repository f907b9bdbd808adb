"""The CUDA driver, the GPUs that it finds, and bytes in their memory."""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from gateway.errors import Code, InferenceError

log = logging.getLogger("sluice.gpus")

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the driver's cuDeviceGetAttribute."""

PER_THREAD_STREAM = 2
"""The driver's CU_STREAM_PER_THREAD, which waits for no other stream."""


class CudaFailed(Exception):
    """A call of the CUDA driver failed."""


@cache
def load_driver() -> Any | None:
    """The CUDA driver, or None on a machine without a GPU.

    Processes that are forked from now on cannot use CUDA; engines and workers are spawned.
    """
    for library in LIBRARIES:
        try:
            driver = ctypes.CDLL(library)
            call(driver, "cuInit", 0)
        except (OSError, CudaFailed):
            continue
        return driver
    return None


def call(driver: Any, function: str, *arguments: Any) -> None:
    """Call a function of the driver; CudaFailed unless it succeeds."""
    if status := getattr(driver, function)(*arguments):
        raise CudaFailed(f"{function} failed with CUDA error {status}")


def usable_gpus(driver: Any | None, minimum: tuple[int, int]) -> tuple[int, ...]:
    """The numbers of the GPUs whose compute capability is (major, minor) or better.

    The numbers are CUDA's: the first GPU of `CUDA_VISIBLE_DEVICES` is 0. If the driver fails, no
    GPU is usable, and the log has the error.
    """
    if driver is None:
        return ()
    try:
        numbers = range(gpu_count(driver))
        return tuple(number for number in numbers if _capability(driver, number) >= minimum)
    except CudaFailed as error:
        log.warning("no GPU is used", extra={"reason": str(error)})
        return ()


def gpu_count(driver: Any) -> int:
    """The number of GPUs of any capability; CudaFailed if the driver fails."""
    return _read_int(lambda found: call(driver, "cuDeviceGetCount", found))


def find_device(driver: Any, number: int) -> int:
    """The driver's handle of a GPU; CudaFailed if the number is unknown."""
    return _read_int(lambda found: call(driver, "cuDeviceGet", found, number))


def memory_in_use(driver: Any | None, number: int) -> float:
    """The fraction of a GPU's memory in use by all processes; CudaFailed if the driver fails.

    The current context of the thread does not change.
    """

    if driver is None:
        raise CudaFailed("there is no CUDA driver")
    device, context = find_device(driver, number), ctypes.c_void_p()
    call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call(driver, "cuCtxPushCurrent_v2", context)
        try:
            return _fraction_in_use(driver)
        finally:
            call(driver, "cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        call(driver, "cuDevicePrimaryCtxRelease_v2", device)


def _fraction_in_use(driver: Any) -> float:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call(driver, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return 1 - free.value / total.value


def _capability(driver: Any, number: int) -> tuple[int, int]:
    device = find_device(driver, number)
    read = "cuDeviceGetAttribute"
    return (
        _read_int(lambda found: call(driver, read, found, MAJOR, device)),
        _read_int(lambda found: call(driver, read, found, MINOR, device)),
    )


def _read_int(ask: Callable[[Any], None]) -> int:
    found = ctypes.c_int()
    ask(ctypes.byref(found))
    return found.value


class DeviceMemory:
    """`byte_size` bytes from `address` on GPU number `gpu`; `owner` keeps the memory allocated.

    Reads do not wait for the streams of a runtime: all writes must have completed.
    """

    __slots__ = ("_owner", "address", "byte_size", "gpu")

    def __init__(self, gpu: int, address: int, byte_size: int, owner: object) -> None:
        self.gpu = gpu
        self.address = address
        self.byte_size = byte_size
        self._owner = owner

    def __len__(self) -> int:
        return self.byte_size

    def read(self) -> memoryview:
        """A copy on the host, read-only; blocks. INTERNAL if the GPU fails."""
        try:
            return memoryview(device(self.gpu).read(self.address, self.byte_size))
        except CudaFailed as error:
            raise _failed("read", self.gpu, error) from None

    def take(self, other: "DeviceMemory") -> None:
        """Copy memory of the same GPU to the start of this; blocks. INTERNAL if the GPU fails."""
        try:
            device(self.gpu).copy(self.address, other.address, other.byte_size)
        except CudaFailed as error:
            raise _failed("write", self.gpu, error) from None


class DeviceRegion:
    """Registered memory of a GPU; a model on the same GPU can write its outputs there."""

    gpu: int

    def part(self, offset: int, byte_size: int) -> DeviceMemory:
        """Bytes [offset, offset + byte_size), which keep the region allocated."""
        raise NotImplementedError

    def take(self, offset: int, data: DeviceMemory) -> DeviceMemory:
        """The bytes from `offset` on, to which memory of the same GPU is copied; blocks.

        Memory that is there already is not copied. INTERNAL if the GPU fails.
        """
        there = self.part(offset, len(data))
        if there.address != data.address:
            there.take(data)
        return there


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU by the CUDA driver; the process retains its primary context."""

    driver: Any
    context: ctypes.c_void_p

    def read(self, address: int, byte_size: int) -> bytes:
        """Copy from the GPU."""
        data = ctypes.create_string_buffer(byte_size)
        self.call(*("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(byte_size)))
        return data.raw

    def write(self, address: int, data: bytes) -> None:
        """Copy to the GPU; blocks until another process can read it there."""
        self._copy("cuMemcpyHtoDAsync_v2", address, data, len(data))

    def copy(self, address: int, source: int, byte_size: int) -> None:
        """Copy within the GPU; blocks."""
        self._copy("cuMemcpyDtoDAsync_v2", address, ctypes.c_uint64(source), byte_size)

    def _copy(self, function: str, address: int, source: object, byte_size: int) -> None:
        """Copy by a stream of this thread: cuMemcpy may return before the GPU has the bytes."""
        stream = ctypes.c_void_p(PER_THREAD_STREAM)
        self.call(function, ctypes.c_uint64(address), source, ctypes.c_size_t(byte_size), stream)
        self.call("cuStreamSynchronize", stream)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver in the context of this GPU; CudaFailed if it fails."""
        call(self.driver, "cuCtxSetCurrent", self.context)
        call(self.driver, function, *arguments)


def device(number: int) -> Device:
    """The GPU of that number; CudaFailed if it or the driver is missing."""

    driver = load_driver()
    if driver is None:
        raise CudaFailed("there is no CUDA driver")
    return _open(driver, number)


@cache
def _open(driver: Any, number: int) -> Device:
    found, context = find_device(driver, number), ctypes.c_void_p()
    call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), found)
    return Device(driver, context)


def _failed(what: str, gpu: int, error: CudaFailed) -> InferenceError:
    return InferenceError(Code.INTERNAL, f"cannot {what} memory of GPU {gpu}: {error}")
