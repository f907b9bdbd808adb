"""Measured costs of padded batches, and the batch rules of each instance."""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from gateway.backend import Instance
from gateway.batches.padding import Padding
from gateway.config import ModelConfig, ModelInput
from gateway.config.scheduling import DynamicBatching
from gateway.errors import InferenceError
from gateway.messages import InferRequest
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.batching import Batching, FirstComeBatching
from gateway.schedulers.execution import Entry, Execution
from gateway.schedulers.length_batching import DEFAULT_BUDGET, BatchCost, BatchTime, LengthBatching
from gateway.stream import ResponseStream
from gateway.tensor import NUMPY_TYPES, Datatype, Tensor, array_tensor

log = logging.getLogger("sluice.batching")
LIMIT_SECS = 1.5
"""Limit of one measurement; the execution under way is then cancelled."""
GROWING_SECS = 0.75
"""Time for trying larger batches; the remaining time repeats the same ones."""
ROUNDS = 5
LENGTH = 64
LONGEST = 256
FALLING = 0.75
"""A batch with less than this fraction of the best throughput ends the trials."""


class BatchRules:
    """The batch rules of a model, measured for each instance where they depend on lengths.

    Raises InferenceError INVALID_ARG if the config's padding is invalid.
    """

    def __init__(self, config: ModelConfig, batching: DynamicBatching) -> None:
        self.padding = Padding.read(config)
        self._config = config
        self._batching = batching
        self._measured: dict[Instance, Batching] = {}
        self._usual = self._by_length(
            BatchCost.assumed(self.padding.token_budget or DEFAULT_BUDGET)
        )
        if not self.padding.inputs:
            self._usual = FirstComeBatching(config, batching)

    def of(self, instance: Instance) -> Batching:
        """The rules of an instance."""
        return self._measured.get(instance, self._usual)

    async def prepare(self, instance: Instance) -> None:
        """Measure the instance, if batches are formed by length and no budget is configured."""
        if self.padding.inputs and not self.padding.token_budget:
            points = await measure(instance, self._config, self.padding)
            cost = BatchCost.measured(points)
            self._measured[instance] = self._by_length(cost)
            self._log(cost, points)

    def forget(self, instance: Instance) -> None:
        """Delete the rules of an instance."""
        self._measured.pop(instance, None)

    def _by_length(self, cost: BatchCost) -> Batching:
        return LengthBatching(self._config, self._batching, cost)

    def _log(self, cost: BatchCost, points: Sequence[BatchTime]) -> None:
        log.info(
            "batches measured",
            extra={
                "model": self._config.name,
                "token_budget": cost.budget,
                "overhead_tokens": round(cost.overhead),
                "tokens_per_second": {each.tokens: round(each.rate) for each in points},
            },
        )


async def measure(instance: Instance, config: ModelConfig, padding: Padding) -> list[BatchTime]:
    """The best times of synthetic batches, in the order of their tokens.

    Sizes grow until larger batches are slower, the time is over or a batch fails (logged). Then
    all sizes are repeated in rounds, so that other load on the machine affects all of them.
    """
    probes: list[_Probe] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_SECS):
            await _grow(instance, _samples(config, padding), probes)
            for _ in range(ROUNDS):
                for probe in probes:
                    await probe.run(instance)
    return [probe.point for probe in probes]


@dataclass(slots=True)
class _Probe:
    """A synthetic batch and its best time."""

    request: InferRequest
    tokens: int
    seconds: float = math.inf

    @property
    def point(self) -> BatchTime:
        """The measured time."""
        return BatchTime(self.tokens, self.seconds)

    async def run(self, instance: Instance) -> bool:
        """Execute it; False if it failed."""
        seconds = await _run(instance, self.request)
        if seconds is None:
            return False
        self.seconds = min(self.seconds, seconds)
        return True


async def _grow(instance: Instance, samples: Iterable[_Probe], probes: list[_Probe]) -> None:
    began = time.perf_counter()
    for probe in samples:
        if await _run(instance, probe.request) is None:  # may allocate or compile: not measured
            return
        if not await probe.run(instance):
            return
        probes.append(probe)
        if is_enough([each.point for each in probes]):
            return
        if time.perf_counter() - began > GROWING_SECS:
            return


def _samples(config: ModelConfig, padding: Padding) -> Iterator[_Probe]:
    longest = LONGEST if padding.max_length is None else min(LONGEST, padding.max_length)
    for rows, length in sizes(config.max_batch_size, longest):
        yield _Probe(sample(config, padding, rows, length), rows * length)


def sizes(max_rows: int, longest: int = LONGEST) -> Iterator[tuple[int, int]]:
    """Rows and lengths to measure; each has twice the tokens of the previous one."""
    rows, length = 1, min(LENGTH, longest)
    while rows <= max_rows and length <= longest:
        yield rows, length
        if rows * 2 <= max_rows:
            rows *= 2
        else:
            length *= 2


def is_enough(points: Sequence[BatchTime]) -> bool:
    """Whether larger batches are not worth a trial."""
    return points[-1].rate < FALLING * max(point.rate for point in points)


def sample(config: ModelConfig, padding: Padding, rows: int, length: int) -> InferRequest:
    """A request with padded inputs of that length: ones in masks, zeros elsewhere.

    Variable dims other than the length are 1; optional inputs are omitted.
    """
    inputs = []
    for each in config.input:
        if not each.optional:
            dims = [1 if dim == -1 else dim for dim in each.dims]
            if each.name in padding.inputs:
                dims[0] = length
            inputs.append(_constant(each, (rows, *dims)))
    return InferRequest(model=config.name, inputs=tuple(inputs))


def _constant(model_input: ModelInput, shape: tuple[int, ...]) -> Tensor:
    name, datatype = model_input.name, model_input.datatype
    if datatype is Datatype.BYTES:
        return Tensor(name, datatype, shape, (b"",) * int(np.prod(shape)))
    dtype = NUMPY_TYPES.get(datatype, np.dtype("<u2"))
    fill = np.ones if "mask" in name.lower() else np.zeros
    return array_tensor(name, datatype, fill(shape, dtype=dtype))


async def _run(instance: Instance, request: InferRequest) -> float | None:
    record = Record(ModelStatistics(), request.inputs[0].shape[0], 0, lambda _: None)
    stream = ResponseStream(record)
    began = time.perf_counter()
    await Execution(instance, [Entry(request, stream, record)], ModelStatistics()).run()
    seconds = time.perf_counter() - began
    try:
        await stream.batch()
    except InferenceError as error:
        log.warning(
            "synthetic batch failed", extra={"model": request.model, "reason": error.reason}
        )
        return None
    return seconds
