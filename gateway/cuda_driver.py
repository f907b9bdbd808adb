"""The CUDA driver, and the GPUs that it finds."""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

log = logging.getLogger("sluice.gpus")

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the driver's cuDeviceGetAttribute."""


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
