"""The CUDA driver, which every machine with an NVIDIA GPU has, and the GPUs it finds."""

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
    """A call of the CUDA driver has failed with this number."""


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

    They are those of CUDA: of what `CUDA_VISIBLE_DEVICES` leaves, the first is 0. None are usable,
    and the log says why, where the driver does not answer.
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
    """How many GPUs the driver tells of, whatever they can do; CudaFailed if it does not answer."""
    return _told(lambda found: call(driver, "cuDeviceGetCount", found))


def find_device(driver: Any, number: int) -> int:
    """The driver's handle of a GPU; CudaFailed if there is none of that number."""
    return _told(lambda found: call(driver, "cuDeviceGet", found, number))


def memory_in_use(driver: Any | None, number: int) -> float:
    """Which fraction of a GPU's memory is taken, by whomever; CudaFailed if it cannot be told.

    The thread's own context is left as it was.
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
        _told(lambda found: call(driver, read, found, MAJOR, device)),
        _told(lambda found: call(driver, read, found, MINOR, device)),
    )


def _told(ask: Callable[[Any], None]) -> int:
    found = ctypes.c_int()
    ask(ctypes.byref(found))
    return found.value
