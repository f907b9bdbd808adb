"""Is there a GPU, and which? By the CUDA driver alone."""

import ctypes
from collections.abc import Sequence
from typing import Any

from gateway.cuda_driver import CudaFailed, call, gpu_count, load_driver

LONGEST_NAME = 256


def why_none() -> str:
    """Why nothing can be run on CUDA here; "" if there is a GPU."""
    driver = load_driver()
    if driver is None:
        return "no GPU: the CUDA driver (libcuda.so.1) is not there, or finds no card"
    try:
        return "" if gpu_count(driver) else "no GPU: the CUDA driver tells of none"
    except CudaFailed as error:
        return f"no GPU: {error}"


def cards() -> Sequence[str]:
    """What each GPU is called."""
    if why_none():
        return []
    driver = load_driver()
    return [_name(driver, index) for index in range(gpu_count(driver))]


def _name(driver: Any, index: int) -> str:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(LONGEST_NAME)
    call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    call(driver, "cuDeviceGetName", name, ctypes.c_int(LONGEST_NAME), device)
    return name.value.decode(errors="replace")
