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
"""What a device, or the process's share of it, does not recover from before a new start."""


class CudaError(Exception):
    """A call of the CUDA runtime failed; the text is CUDA's own."""

    def __init__(self, call: str, status: Any, text: str) -> None:
        super().__init__(f"{call}: CUDA error {int(status)}, {text}")
        self.status = int(status)
        self._name = str(status.name)

    @property
    def out_of_memory(self) -> bool:
        """There is too little memory now; nothing is broken."""
        return self.status == OUT_OF_MEMORY

    @property
    def lasting(self) -> bool:
        """If a device still answers so after the call that failed, it will for good."""
        return self._name in LASTING


@dataclass(frozen=True, slots=True)
class Properties:
    """What a GPU is: `capability` such as `9.0`."""

    name: str
    capability: str


class Cuda:
    """The CUDA runtime through its binding, `cuda.bindings.runtime`.

    A device is chosen per thread (`use`). Pointers are numbers, streams and graphs what the
    binding gives. All that takes long releases the interpreter's lock.
    """

    def __init__(self, api: Any) -> None:
        self._api = api

    # Devices.

    def count(self) -> int:
        """How many GPUs this process can use."""
        return int(self._call("cudaGetDeviceCount"))

    def use(self, device: int) -> None:
        """What this thread does next is meant for that device."""
        self._call("cudaSetDevice", device)

    def properties(self, device: int) -> Properties:
        """What that device is."""
        found = self._call("cudaGetDeviceProperties", device)
        name = found.name.decode(errors="replace").rstrip("\0")
        return Properties(name, f"{found.major}.{found.minor}")

    def forget(self) -> None:
        """What has failed on this thread is known; TensorRT must not take it as its own."""
        self._api.cudaGetLastError()

    # Streams.

    def new_stream(self, urgency: int) -> Any:
        """A stream: more urgent than others with 1, less with -1, as others with 0."""
        least, greatest = self._call("cudaDeviceGetStreamPriorityRange")
        priority = {1: greatest, -1: least}.get(urgency, 0)
        flags = self._api.cudaStreamNonBlocking
        return self._call("cudaStreamCreateWithPriority", flags, priority)

    def end_stream(self, stream: Any) -> None:
        self._call("cudaStreamDestroy", stream)

    def drain(self, stream: Any) -> None:
        """Wait for all work of the stream, with the processor spinning."""
        self._call("cudaStreamSynchronize", stream)

    def new_event(self, *, spins: bool) -> Any:
        """A mark in a stream to wait for; a thread that waits spins or sleeps."""
        api = self._api
        waiting = api.cudaEventDefault if spins else api.cudaEventBlockingSync
        return self._call("cudaEventCreateWithFlags", waiting | api.cudaEventDisableTiming)

    def end_event(self, event: Any) -> None:
        self._call("cudaEventDestroy", event)

    def wait(self, event: Any, stream: Any) -> None:
        """Wait for what the stream has to do up to now."""
        self._call("cudaEventRecord", event, stream)
        self._call("cudaEventSynchronize", event)

    # Memory.

    def allocate(self, size: int, stream: Any) -> int:
        """Memory of the device, in the order of the stream: no other stream waits for it."""
        return int(self._call("cudaMallocAsync", size, stream))

    def free(self, memory: int, stream: Any) -> None:
        self._call("cudaFreeAsync", memory, stream)

    def allocate_pinned(self, size: int) -> int:
        """Memory of the host that a device copies from and to by itself."""
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
        """What this thread gives the stream is written down, and not done."""
        mode = self._api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: Any) -> Any:
        """What was written down, ready to be launched."""
        graph = self._call("cudaStreamEndCapture", stream)
        try:
            return self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)

    def abandon_capture(self, stream: Any) -> None:
        """End one that has failed, whatever was written down."""
        status, graph = self._api.cudaStreamEndCapture(stream)
        if int(status) == 0:
            self._call("cudaGraphDestroy", graph)
        self.forget()

    def launch(self, graph: Any, stream: Any) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def end_graph(self, graph: Any) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Results are a tuple whose first member is the status; those of one are not wrapped."""
        status, *results = getattr(self._api, name)(*arguments)
        if int(status) != 0:
            self.forget()
            _, text = self._api.cudaGetErrorString(status)
            raise CudaError(name, status, text.decode())
        return results[0] if len(results) == 1 else tuple(results)


class Gpu:
    """A stream of its own on one device; close it on a thread that `use`s the device.

    `urgency` is that of its work against other streams', -1 to 1. With `spins` a thread that
    waits for the device keeps its processor busy.
    """

    def __init__(self, cuda: Cuda, device: int, urgency: int = 0, *, spins: bool = False) -> None:
        self.cuda = cuda
        self.device = device
        self._stream = cuda.new_stream(urgency)
        try:
            self._event = cuda.new_event(spins=spins)
        except CudaError:
            cuda.end_stream(self._stream)
            raise

    def use(self) -> Self:
        """What this thread does next is meant for the device."""
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
        """Until the device has done all that the stream was given."""
        self.cuda.wait(self._event, self._stream)

    def complaint(self) -> CudaError | None:
        """What the stream answers after a call that has failed; None: all is done and in order.

        No other stream is waited for: CUDA refuses to wait for a device while anybody captures a
        graph there, and spoils that graph. What a device does not recover from, each stream tells.
        """
        self.cuda.forget()
        try:
            self.wait()
        except CudaError as error:
            return error
        return None

    def close(self) -> None:
        """Wait for the stream, and end it; each step is tried, and the last failure raised."""
        with ExitStack() as ending:
            ending.callback(self.cuda.end_stream, self._stream)
            ending.callback(self.cuda.end_event, self._event)
            self.cuda.drain(self._stream)
