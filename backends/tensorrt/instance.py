"""One instance of a TensorRT model, and its failures."""

import asyncio
import logging
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack

from backends.tensorrt.cuda import CudaError, GpuStream
from backends.tensorrt.engines import Engine
from backends.tensorrt.library import LIBRARY_ERRORS, LibraryError, clear
from backends.tensorrt.plan import PlanOnGpu
from gateway.backend import ModelContext
from gateway.errors import InferenceError
from gateway.tensor import Tensor
from gateway.tensor_runtime.instance import TensorInstance

log = logging.getLogger("sluice.tensorrt")


class TensorRtInstance(TensorInstance):
    """Executes a plan on a GPU, from a thread of its own that sleeps during executions.

    It dies if its GPU fails permanently, with all instances of this process there.
    """

    def __init__(
        self,
        context: ModelContext,
        engine: Engine,
        gpu: GpuStream,
        plan: PlanOnGpu,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(context.config, context.name)
        self._subject = engine.subject
        self._gpu = gpu
        self.gpu = gpu.device
        self._plan = plan
        self._death: Future[str] = Future()
        self.death = asyncio.wrap_future(self._death, loop=loop)

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return not self._death.done()

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[str], staying: Set[str]
    ) -> Mapping[str, Tensor]:
        try:
            return self._plan.run(inputs, outputs, staying)
        except (CudaError, LibraryError, *LIBRARY_ERRORS) as error:
            raise self._explained(error) from error

    def release(self) -> None:
        try:
            with ExitStack() as closing:
                closing.callback(self._gpu.close)
                closing.callback(self._plan.close)
        except CudaError as error:
            if not self._death.done():
                raise
            log.info(
                "memory not released: GPU lost",
                extra={"gpu": self._subject.gpu, "reason": str(error)},
            )
        finally:
            del self._plan

    def _explained(self, error: Exception) -> InferenceError:
        """The error of a failed execution; the instance dies if its GPU has failed permanently."""
        failure = self._gpu.failure()
        if failure is not None and failure.lasting:
            return self._died(failure)
        if isinstance(error, CudaError) and error.out_of_memory:
            if failure is None:
                self._plan.shrink()
            return self._subject.out_of_memory(error)
        return self._subject.failed(clear(str(error)))

    def _died(self, failure: CudaError) -> InferenceError:
        lost = self._subject.lost(failure)
        if not self._death.done():
            self._death.set_result(lost.message)
        return lost
