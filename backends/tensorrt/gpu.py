"""Where is an instance on a GPU: the device, a stream and a way to wait for it."""

from contextlib import ExitStack
from typing import Any, Self

from backends.tensorrt.cuda import Cuda, CudaError


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
