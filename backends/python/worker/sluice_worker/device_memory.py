"""What is in a GPU's memory, by CUDA's driver alone."""

import ctypes

from .errors import TritonModelException

CUDA, CUDA_MANAGED = 2, 13


def copied(device: tuple[int, int], start: int, size_bytes: int) -> bytes:
    """Copy memory of a GPU to the machine's, once what was written there has been written.

    TritonModelException if the device is no CUDA device, or its driver refuses.
    """
    kind, number = device
    if kind not in (CUDA, CUDA_MANAGED):
        raise TritonModelException(f"DLPack tensor is on a device of kind {kind}, not on a GPU.")
    if not size_bytes:
        return b""
    driver = _driver()
    context, target = ctypes.c_void_p(), ctypes.create_string_buffer(size_bytes)
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    try:
        _check(driver.cuCtxSetCurrent(context))
        _check(driver.cuCtxSynchronize())
        _check(driver.cuMemcpyDtoH_v2(target, ctypes.c_uint64(start), ctypes.c_size_t(size_bytes)))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(number)
    return target.raw


def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TritonModelException("Tensor is stored in GPU, and there is no driver.") from error
    _check(driver.cuInit(0))
    return driver


def _check(status: int) -> None:
    if status:
        raise TritonModelException(f"Tensor is stored in GPU, and CUDA answered error {status}.")
