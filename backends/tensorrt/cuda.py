"""Calls of the CUDA runtime, and a stream on one GPU."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

OUT_OF_MEMORY = 2
"""`cudaErrorMemoryAllocation`."""
LASTING = frozenset(
    {
        "cudaErrorInitializationError",
        "cudaErrorCudartUnloading",
        "cudaErrorDevicesUnavailable",
        "cudaErrorNoDevice",
        "cudaErrorInvalidDevice",
        "cudaErrorDeviceUninitialized",
        "cudaErrorECCUncorrectable",
        "cudaErrorNvlinkUncorrectable",
        "cudaErrorContained",
        "cudaErrorIllegalAddress",
        "cudaErrorLaunchTimeout",
        "cudaErrorContextIsDestroyed",
        "cudaErrorAssert",
        "cudaErrorHardwareStackError",
        "cudaErrorIllegalInstruction",
        "cudaErrorMisalignedAddress",
        "cudaErrorInvalidAddressSpace",
        "cudaErrorInvalidPc",
        "cudaErrorLaunchFailure",
        "cudaErrorTensorMemoryLeak",
        "cudaErrorSystemNotReady",
        "cudaErrorMpsConnectionFailed",
        "cudaErrorMpsRpcFailure",
        "cudaErrorMpsServerNotReady",
        "cudaErrorMpsClientTerminated",
        "cudaErrorExternalDevice",
        "cudaErrorUnknown",
    }
)
"""Errors from which a device does not recover within this process."""


class CudaError(Exception):
    """A call of the CUDA runtime failed; the text is CUDA's own."""

    def __init__(self, call: str, status: Any, text: str) -> None:
        super().__init__(f"{call}: CUDA error {int(status)}, {text}")
        self.status = int(status)
        self._name = str(status.name)

    @property
    def out_of_memory(self) -> bool:
        """Whether there is too little memory now; later calls may succeed."""
        return self.status == OUT_OF_MEMORY

    @property
    def lasting(self) -> bool:
        """Whether the device will return this error until the process is restarted."""
        return self._name in LASTING


@dataclass(frozen=True, slots=True)
class Properties:
    """Name and compute capability (such as `9.0`) of a GPU."""

    name: str
    capability: str


class CudaRuntime:
    """The CUDA runtime through its binding, `cuda.bindings.runtime`.

    A device is chosen per thread (`use`). Pointers are integers; streams and graphs are objects of
    the binding. Long calls release the interpreter's lock.
    """

    def __init__(self, api: Any) -> None:
        self._api = api

    # Devices.

    def count(self) -> int:
        """The number of GPUs that this process can use."""
        return int(self._call("cudaGetDeviceCount"))

    def use(self, device: int) -> None:
        """Direct the next calls of this thread to that device."""
        self._call("cudaSetDevice", device)

    def properties(self, device: int) -> Properties:
        """The properties of that device."""
        found = self._call("cudaGetDeviceProperties", device)
        name = found.name.decode(errors="replace").rstrip("\0")
        return Properties(name, f"{found.major}.{found.minor}")

    def forget(self) -> None:
        """Clear the last error of this thread, which TensorRT would take as its own."""
        self._api.cudaGetLastError()

    # Streams.

    def new_stream(self, urgency: int) -> Any:
        """A stream with the priority of others (0), a higher (1) or a lower one (-1)."""
        least, greatest = self._call("cudaDeviceGetStreamPriorityRange")
        priority = {1: greatest, -1: least}.get(urgency, 0)
        flags = self._api.cudaStreamNonBlocking
        return self._call("cudaStreamCreateWithPriority", flags, priority)

    def end_stream(self, stream: Any) -> None:
        self._call("cudaStreamDestroy", stream)

    def drain(self, stream: Any) -> None:
        """Wait for all work of the stream; the thread spins."""
        self._call("cudaStreamSynchronize", stream)

    def new_event(self, *, spins: bool) -> Any:
        """An event to wait for; a waiting thread spins or sleeps."""
        api = self._api
        waiting = api.cudaEventDefault if spins else api.cudaEventBlockingSync
        return self._call("cudaEventCreateWithFlags", waiting | api.cudaEventDisableTiming)

    def end_event(self, event: Any) -> None:
        self._call("cudaEventDestroy", event)

    def wait(self, event: Any, stream: Any) -> None:
        """Wait for the present work of the stream."""
        self._call("cudaEventRecord", event, stream)
        self._call("cudaEventSynchronize", event)

    # Memory.

    def allocate(self, size: int, stream: Any) -> int:
        """Device memory, in the order of the stream: no other stream waits for it."""
        return int(self._call("cudaMallocAsync", size, stream))

    def free(self, memory: int, stream: Any) -> None:
        self._call("cudaFreeAsync", memory, stream)

    def allocate_pinned(self, size: int) -> int:
        """Pinned host memory, from and to which a device copies by itself."""
        return int(self._call("cudaHostAlloc", size, self._api.cudaHostAllocDefault))

    def free_pinned(self, memory: int) -> None:
        self._call("cudaFreeHost", memory)

    def to_device(self, device: int, host: int, size: int, stream: Any) -> None:
        kind = self._api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", device, host, size, kind, stream)

    def to_host(self, host: int, device: int, size: int, stream: Any) -> None:
        kind = self._api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", host, device, size, kind, stream)

    def within_device(self, there: int, here: int, size: int, stream: Any) -> None:
        """Copy from one place on a device to another."""
        kind = self._api.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpyAsync", there, here, size, kind, stream)

    def zero(self, device: int, size: int, stream: Any) -> None:
        self._call("cudaMemsetAsync", device, 0, size, stream)

    # Graphs.

    def begin_capture(self, stream: Any) -> None:
        """Capture the work that this thread adds to the stream; it is not executed."""
        mode = self._api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: Any) -> Any:
        """The captured graph, ready to be launched."""
        graph = self._call("cudaStreamEndCapture", stream)
        try:
            return self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)

    def abandon_capture(self, stream: Any) -> None:
        """End a failed capture, and drop its graph."""
        status, graph = self._api.cudaStreamEndCapture(stream)
        if int(status) == 0:
            self._call("cudaGraphDestroy", graph)
        self.forget()

    def launch(self, graph: Any, stream: Any) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def end_graph(self, graph: Any) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the binding, whose result is a tuple that begins with the status."""
        status, *results = getattr(self._api, name)(*arguments)
        if int(status) != 0:
            self.forget()
            _, text = self._api.cudaGetErrorString(status)
            raise CudaError(name, status, text.decode())
        return results[0] if len(results) == 1 else tuple(results)


class GpuStream:
    """A stream on one device; close it on a thread that `use`s the device.

    `urgency` is its priority against other streams, -1 to 1. With `spins` a waiting thread keeps
    its core busy.
    """

    def __init__(
        self, cuda: CudaRuntime, device: int, urgency: int = 0, *, spins: bool = False
    ) -> None:
        self.cuda = cuda
        self.device = device
        self._stream = cuda.new_stream(urgency)
        try:
            self._event = cuda.new_event(spins=spins)
        except CudaError:
            cuda.end_stream(self._stream)
            raise

    def use(self) -> Self:
        """Direct the next calls of this thread to the device."""
        self.cuda.use(self.device)
        return self

    @property
    def stream(self) -> Any:
        """For the CUDA runtime."""
        return self._stream

    @property
    def stream_handle(self) -> int:
        """For TensorRT."""
        return int(self._stream)

    def wait(self) -> None:
        """Wait until the device has done all work of the stream."""
        self.cuda.wait(self._event, self._stream)

    def failure(self) -> CudaError | None:
        """The error of the stream after a failed call; None if the stream works.

        It does not wait for other streams: waiting for a device during a capture fails, and spoils
        the capture. Each stream reports the permanent errors of its device.
        """
        self.cuda.forget()
        try:
            self.wait()
        except CudaError as error:
            return error
        return None

    def close(self) -> None:
        """Wait for the stream, and destroy it; each step is tried, and the last failure raised."""
        with ExitStack() as ending:
            ending.callback(self.cuda.end_stream, self._stream)
            ending.callback(self.cuda.end_event, self._event)
            self.cuda.drain(self._stream)
