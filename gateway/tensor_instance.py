"""What a runtime of tensors in, tensors out implements: one blocking method."""

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from gateway.backend import Answer, Instance
from gateway.config import ModelConfig
from gateway.messages import InferRequest, InferResponse, Phases
from gateway.stacking import Stacking
from gateway.tensor import Tensor


class TensorInstance(Instance):
    """Stacks the inputs of an execution, runs it on a thread of its own, splits the outputs.

    Subclasses write `run`, and `release` if they hold what must be freed.
    """

    def __init__(self, config: ModelConfig, name: str) -> None:
        self._stacking = Stacking(config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    @abstractmethod
    def run(self, inputs: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Compute the named outputs, in that order; blocks, without the interpreter's lock.

        Shapes have the leading batch dimension if the model batches. Raises InferenceError.
        """

    def release(self) -> None:
        """Free what `run` uses; called once, on the same thread, after the last run."""

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        loop = asyncio.get_running_loop()
        for answer in await loop.run_in_executor(self._thread, self._answer, requests):
            yield answer

    async def close(self) -> None:
        """Wait for the last run, and free everything."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.release)
        self._thread.shutdown(wait=False)

    def _answer(self, requests: Sequence[InferRequest]) -> list[Answer]:
        began = time.perf_counter_ns()
        inputs = self._stacking.gather(requests)
        gathered = time.perf_counter_ns()
        outputs = self.run(inputs, self._stacking.wanted(requests))
        ran = time.perf_counter_ns()
        scattered = list(self._stacking.scatter(outputs, requests))
        ended = time.perf_counter_ns()
        phases = Phases(gathered - began, ran - gathered, ended - ran)
        return [
            (index, InferResponse(outputs=found, final=True, phases=phases))
            for index, found in enumerate(scattered)
        ]
