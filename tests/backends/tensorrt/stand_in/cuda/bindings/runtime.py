"""A stand-in for `cuda.bindings.runtime`: what the backend calls, with its signatures."""

import ctypes
import functools
import threading
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from cuda.bindings import world as gpus
from cuda.bindings.world import Refused, Stream, world

cudaEventDefault = 0
cudaEventBlockingSync = 1
cudaEventDisableTiming = 2
cudaHostAllocDefault = 0
cudaStreamNonBlocking = 1


class cudaError_t(IntEnum):
    cudaSuccess = gpus.SUCCESS
    cudaErrorInvalidValue = gpus.INVALID_VALUE
    cudaErrorMemoryAllocation = gpus.OUT_OF_MEMORY
    cudaErrorInvalidDevice = gpus.INVALID_DEVICE
    cudaErrorInvalidResourceHandle = gpus.INVALID_HANDLE
    cudaErrorLaunchFailure = gpus.LAUNCH_FAILURE
    cudaErrorStreamCaptureUnsupported = gpus.CAPTURE_UNSUPPORTED
    cudaErrorStreamCaptureInvalidated = gpus.CAPTURE_INVALIDATED


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaStreamCaptureMode(IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1


class cudaStream_t:
    """A handle; so are events and graphs."""

    def __init__(self, number: int = 0) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number


class cudaEvent_t(cudaStream_t):
    pass


class cudaGraph_t(cudaStream_t):
    pass


class cudaGraphExec_t(cudaStream_t):
    pass


def _call(results: int = 0) -> Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]:
    """The function's value behind the status, or None instead if that is no success."""

    def wrap(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(function)
        def made(*arguments: Any) -> tuple[Any, ...]:
            with world.lock:
                world.calls[function.__name__] += 1
                try:
                    if world.device in world.lost:
                        raise Refused(gpus.LAUNCH_FAILURE)
                    if planned := world.refusals.get(function.__name__):
                        raise Refused(planned.pop(0))
                    found = function(*arguments)
                except Refused as refused:
                    world.last_error = refused.status
                    return (cudaError_t(refused.status), *[None] * results)
            return (cudaError_t.cudaSuccess, *(found if results > 1 else [found] * results))

        return made

    return wrap


def cudaGetErrorString(error: cudaError_t) -> tuple[cudaError_t, bytes]:
    return cudaError_t.cudaSuccess, gpus.TEXTS[cudaError_t(error)].encode()


def cudaGetLastError() -> tuple[cudaError_t]:
    found, world.last_error = world.last_error, gpus.SUCCESS
    return (cudaError_t(gpus.LAUNCH_FAILURE if world.device in world.lost else found),)


@_call()
def cudaDeviceSynchronize() -> None:
    """Refused while any stream of the device captures; the captures are spoiled."""
    streams = world.streams()
    capturing = [each for each in streams if each.capturing is not None]
    for each in capturing:
        each.spoiled = True
    for each in capturing or streams:
        each.finish()


@_call(1)
def cudaGetDeviceCount() -> int:
    return world.gpus


@_call()
def cudaSetDevice(device: int) -> None:
    if not 0 <= device < world.gpus:
        raise Refused(gpus.INVALID_DEVICE)
    world.device = device


@_call(1)
def cudaGetDeviceProperties(device: int) -> Any:
    if not 0 <= device < world.gpus:
        raise Refused(gpus.INVALID_DEVICE)
    major, minor = map(int, world.capability.split("."))
    return SimpleNamespace(name=world.name.encode(), major=major, minor=minor)


# Streams and events.


@_call(2)
def cudaDeviceGetStreamPriorityRange() -> tuple[int, int]:
    return 0, -5


@_call(1)
def cudaStreamCreateWithPriority(flags: int, priority: int) -> cudaStream_t:
    if flags not in (0, cudaStreamNonBlocking) or not -5 <= priority <= 0:
        raise Refused(gpus.INVALID_VALUE)
    world.calls[f"priority {priority}"] += 1
    return cudaStream_t(world.new_handle("stream", Stream(world.device)))


@_call()
def cudaStreamDestroy(stream: Any) -> None:
    world.stream(int(stream)).finish()
    world.end_handle("stream", int(stream))


@_call()
def cudaStreamSynchronize(stream: Any) -> None:
    world.stream(int(stream)).finish()


@_call(1)
def cudaEventCreateWithFlags(flags: int) -> cudaEvent_t:
    world.calls[f"event {flags}"] += 1
    return cudaEvent_t(world.new_handle("event", []))


@_call()
def cudaEventRecord(event: Any, stream: Any) -> None:
    world.handles[int(event)][:] = [world.stream(int(stream))]


@_call()
def cudaEventSynchronize(event: Any) -> None:
    for stream in world.handles[int(event)]:
        stream.finish()


@_call()
def cudaEventDestroy(event: Any) -> None:
    world.end_handle("event", int(event))


# Memory.


@_call(1)
def cudaMallocAsync(size: int, hStream: Any) -> int:
    stream = world.stream(int(hStream))
    try:
        return world.allocate(size, stream.device)
    except Refused:
        stream.finish()  # the memory that the stream is about to free can be allocated again
        return world.allocate(size, stream.device)


@_call()
def cudaFreeAsync(devPtr: int, hStream: Any) -> None:
    stream = world.stream(int(hStream))
    world.require(devPtr, 1, stream.device)
    stream.give(lambda: world.free(devPtr, stream.device))


@_call(1)
def cudaHostAlloc(size: int, flags: int) -> int:
    if flags != cudaHostAllocDefault:
        raise Refused(gpus.INVALID_VALUE)
    return world.allocate(size, None)


@_call()
def cudaFreeHost(ptr: int) -> None:
    world.free(ptr, None)


@_call()
def cudaMemcpyAsync(dst: int, src: int, count: int, kind: cudaMemcpyKind, stream: Any) -> None:
    if not isinstance(kind, cudaMemcpyKind):
        raise TypeError(f"kind is {kind!r}, expected a cudaMemcpyKind")
    found = world.stream(int(stream))
    world.calls[kind.name] += 1
    from_host = kind is cudaMemcpyKind.cudaMemcpyHostToDevice
    to_host = kind is cudaMemcpyKind.cudaMemcpyDeviceToHost
    world.require(dst, count, None if to_host else found.device)
    world.require(src, count, None if from_host else found.device)
    found.give(lambda: ctypes.memmove(dst, src, count) and None)


@_call()
def cudaMemsetAsync(devPtr: int, value: int, count: int, stream: Any) -> None:
    found = world.stream(int(stream))
    world.require(devPtr, count, found.device)
    found.give(lambda: ctypes.memset(devPtr, value, count) and None)


# Graphs.


@_call()
def cudaStreamBeginCapture(stream: Any, mode: cudaStreamCaptureMode) -> None:
    if not isinstance(mode, cudaStreamCaptureMode):
        raise TypeError(f"mode is {mode!r}, expected a cudaStreamCaptureMode")
    found = world.stream(int(stream))
    found.capturing, found.captured_by, found.spoiled = [], threading.get_ident(), False


@_call(1)
def cudaStreamEndCapture(stream: Any) -> cudaGraph_t:
    found = world.stream(int(stream))
    if found.capturing is None or found.captured_by != threading.get_ident():
        raise Refused(gpus.INVALID_VALUE)
    work, found.capturing = found.capturing, None
    if found.spoiled:
        raise Refused(gpus.CAPTURE_INVALIDATED)
    return cudaGraph_t(world.new_handle("graph", work))


@_call(1)
def cudaGraphInstantiate(graph: Any, flags: int) -> cudaGraphExec_t:
    return cudaGraphExec_t(world.new_handle("executable graph", list(world.handles[int(graph)])))


@_call()
def cudaGraphLaunch(graphExec: Any, stream: Any) -> None:
    found = world.stream(int(stream))
    for work in world.handles[int(graphExec)]:
        found.give(work)


@_call()
def cudaGraphExecDestroy(graphExec: Any) -> None:
    world.end_handle("executable graph", int(graphExec))


@_call()
def cudaGraphDestroy(graph: Any) -> None:
    world.end_handle("graph", int(graph))
