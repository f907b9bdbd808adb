"""One instance of a TensorRT model: tensors to its GPU and back, and what becomes of failures."""

import asyncio
import logging
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack

from backends.tensorrt.cuda import CudaError, Gpu
from backends.tensorrt.engines import Engine
from backends.tensorrt.failures import LIBRARY_ERRORS
from backends.tensorrt.library import LibraryError, clear
from backends.tensorrt.plan import PlanOnGpu
from gateway.backend import ModelContext
from gateway.errors import InferenceError
from gateway.tensor import Tensor
from gateway.tensor_runtime.instance import TensorInstance

log = logging.getLogger("sluice.tensorrt")


class TensorRtInstance(TensorInstance):
    """Executes a plan on a GPU, from a thread of its own that sleeps meanwhile.

    It dies if its GPU fails for good, as all of this process's instances there do.
    """

    def __init__(self, context: ModelContext, engine: Engine, gpu: Gpu, plan: PlanOnGpu) -> None:
        super().__init__(context.config, context.name)
        self._subject = engine.subject
        self._gpu = gpu
        self.gpu = gpu.device
        self._plan = plan
        self._gone: Future[str] = Future()

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return not self._gone.done()

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[str], staying: Set[str]
    ) -> Mapping[str, Tensor]:
        try:
            return self._plan.run(inputs, outputs, staying)
        except (CudaError, LibraryError, *LIBRARY_ERRORS) as error:
            raise self._explained(error) from error

    async def died(self) -> str:
        # Whoever stops waiting must not cancel what the thread has yet to say.
        return await asyncio.shield(asyncio.wrap_future(self._gone))

    def release(self) -> None:
        try:
            with ExitStack() as closing:
                closing.callback(self._gpu.close)
                closing.callback(self._plan.close)
        except CudaError as error:
            if not self._gone.done():
                raise
            log.info("went with its GPU", extra={"gpu": self._subject.gpu, "reason": str(error)})
        finally:
            del self._plan

    def _explained(self, error: Exception) -> InferenceError:
        """Why it failed, and whether the GPU did for good."""
        complaint = self._gpu.complaint()
        if complaint is not None and complaint.lasting:
            return self._died(complaint)
        if isinstance(error, CudaError) and error.out_of_memory:
            if complaint is None:
                self._plan.shrink()
            return self._subject.out_of_memory(error)
        return self._subject.failed(clear(str(error)))

    def _died(self, complaint: CudaError) -> InferenceError:
        gone = self._subject.gone(complaint)
        if not self._gone.done():
            self._gone.set_result(gone.message)
        return gone
