"""Rules for forming batches of padded inputs, by the measured costs of their lengths.

Triton's batcher never reorders its queue; this one does, for models that declare padded inputs.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import numpy as np

from gateway.backend import Instance
from gateway.batches.padding import Padding
from gateway.config import ModelConfig, ModelInput
from gateway.config.scheduling import DynamicBatching
from gateway.errors import InferenceError
from gateway.messages import InferRequest
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.batching import Batching, Decision, FirstComeBatching, most_rows
from gateway.schedulers.execution import Entry, Execution
from gateway.schedulers.queue import NS_PER_US, QueuedRequest
from gateway.stream import ResponseStream
from gateway.tensor import NUMPY_TYPES, Datatype, Tensor, array_tensor

log = logging.getLogger("sluice.batching")

LOOK_AHEAD = 128
"""Number of requests considered for one batch; a decision takes less than a millisecond."""
DEFAULT_BUDGET = 512
BUDGET_PER_OVERHEAD = 16
"""Budget divided by overhead, without a measurement."""
LEAST_BUDGET = 256
LEAST_OVERHEAD = 8.0
"""Lower limits of measured values, which other load may distort."""
NEARLY_BEST = 0.98
"""The budget is the smallest batch with this fraction of the best throughput."""
LIMIT_SECS = 1.5
"""Limit of one measurement; the execution under way is then cancelled."""
GROWING_SECS = 0.75
"""Time for trying larger batches; the remaining time repeats the same ones."""
ROUNDS = 5
LENGTH = 64
LONGEST = 256
FALLING = 0.75
"""A batch with less than this fraction of the best throughput ends the trials."""


@dataclass(frozen=True, slots=True)
class BatchTime:
    """The measured time of a batch with that many padded tokens."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class BatchCost:
    """The cost of a batch: its padded tokens plus `overhead`, also in tokens.

    `budget` is the most padded tokens of a batch of several requests.
    """

    budget: int
    overhead: float

    @classmethod
    def assumed(cls, budget: int = DEFAULT_BUDGET) -> "BatchCost":
        """The cost for a configured budget, without a measurement."""
        return cls(budget, budget / BUDGET_PER_OVERHEAD)

    @classmethod
    def measured(cls, points: Sequence[BatchTime]) -> "BatchCost":
        """The budget with the best throughput, and the overhead that fits the times up to it.

        `points` are in the order of their tokens. Fewer than two yield the default.
        """
        if len(points) < 2:
            return cls.assumed()
        enough = NEARLY_BEST * max(point.rate for point in points)
        budget = next(point.tokens for point in points if point.rate >= enough)
        useful = [point for point in points if point.tokens <= budget]
        overhead = _overhead(useful if len(useful) > 1 else points[:2])
        return cls(max(budget, LEAST_BUDGET), max(overhead, LEAST_OVERHEAD))


def _overhead(points: Sequence[BatchTime]) -> float:
    """The time of a batch without tokens, in tokens.

    A straight line through the times, by least squares of the relative errors.
    """
    weights = [1 / point.seconds**2 for point in points]
    total = sum(weights)
    tokens = sum(w * p.tokens for w, p in zip(weights, points, strict=True)) / total
    seconds = sum(w * p.seconds for w, p in zip(weights, points, strict=True)) / total
    spread = sum(w * (p.tokens - tokens) ** 2 for w, p in zip(weights, points, strict=True))
    shared = sum(
        w * (p.tokens - tokens) * (p.seconds - seconds)
        for w, p in zip(weights, points, strict=True)
    )
    slope = shared / spread
    most = float(points[-1].tokens)
    if slope <= 0:
        return most
    return min(max(seconds / slope - tokens, 0.0), most)


class LengthBatching:
    """Cuts the queue into the cheapest batches; the batch with the first request executes.

    The requests are cut by length, so that a batch has similar lengths, at most `cost.budget`
    padded tokens and at most `max_batch_size` rows. Since the first request always executes, a
    request is overtaken at most once per request that was ahead of it.
    """

    def __init__(self, config: ModelConfig, batching: DynamicBatching, cost: BatchCost) -> None:
        self.delay_ns = batching.max_queue_delay_microseconds * NS_PER_US
        self.cost = cost
        self._max_rows = most_rows(config, batching)

    def decide(self, queue: Iterable[QueuedRequest], now_ns: int) -> Decision:
        alike = _like_the_first(queue)
        if not alike:
            return Decision()
        until_ns = alike[0].arrived_ns + self.delay_ns
        if self.delay_ns and now_ns < until_ns and not self._enough(alike):
            return Decision(until_ns=until_ns)
        batches = cheapest(alike, self._max_rows, self.cost)
        return Decision(next(batch for batch in batches if alike[0] in batch))

    def _enough(self, alike: Sequence[QueuedRequest]) -> bool:
        tokens = sum(waiting.length * waiting.rows for waiting in alike)
        rows = sum(waiting.rows for waiting in alike)
        return tokens >= self.cost.budget or rows >= self._max_rows or len(alike) == LOOK_AHEAD


def _like_the_first(queue: Iterable[QueuedRequest]) -> list[QueuedRequest]:
    """The requests of the same key and priority as the first."""
    alike: list[QueuedRequest] = []
    for waiting in islice(queue, LOOK_AHEAD):
        if not alike or (waiting.key == alike[0].key and waiting.level == alike[0].level):
            alike.append(waiting)
    return alike


def cheapest(
    requests: Iterable[QueuedRequest], max_rows: int, cost: BatchCost
) -> list[tuple[QueuedRequest, ...]]:
    """Cut requests, sorted by length, into batches of the least total cost.

    A batch costs its longest length times its rows, and the overhead. Each has at most `max_rows`
    rows and, unless it is a single request, at most `cost.budget` padded tokens.
    """
    ranked = sorted(requests, key=attrgetter("length"))
    starts = _starts(ranked, max_rows, cost)
    batches: list[tuple[QueuedRequest, ...]] = []
    end = len(ranked)
    while end:
        batches.append(tuple(ranked[starts[end - 1] : end]))
        end = starts[end - 1]
    return batches


def _starts(ranked: Sequence[QueuedRequest], max_rows: int, cost: BatchCost) -> list[int]:
    """For each request the start of the batch that ends with it, in the cheapest cut up to it."""
    least = [0.0]  # costs of the first n requests
    useful = [0]  # their tokens without padding: a lower bound of the cost
    starts: list[int] = []
    for end, last in enumerate(ranked):
        best, best_start, rows = float("inf"), end, 0
        for start in range(end, -1, -1):
            rows += ranked[start].rows
            tokens = last.length * rows
            if start < end and (rows > max_rows or tokens > cost.budget):
                break
            if useful[start] + cost.overhead + tokens >= best:
                break
            if least[start] + cost.overhead + tokens < best:
                best, best_start = least[start] + cost.overhead + tokens, start
        least.append(best)
        useful.append(useful[-1] + last.length * last.rows)
        starts.append(best_start)
    return starts


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


class BatchRules:
    """The batch rules of a model; `measured` has those of instances that were measured.

    Instances are measured if batches are formed by length. `usual` are the rules of the others.
    Raises InferenceError INVALID_ARG if the config's padding is invalid.
    """

    def __init__(self, config: ModelConfig, batching: DynamicBatching) -> None:
        self.padding = Padding.read(config)
        self._config = config
        self._batching = batching
        self.measured: dict[Instance, Batching] = {}
        self.usual = self._by_length(BatchCost.assumed(self.padding.token_budget or DEFAULT_BUDGET))
        if not self.padding.inputs:
            self.usual = FirstComeBatching(config, batching)

    async def prepare(self, instance: Instance) -> None:
        """Measure the instance, if batches are formed by length and no budget is configured."""
        if self.padding.inputs and not self.padding.token_budget:
            with instance.sharing:  # batches form while others execute
                points = await measure(instance, self._config, self.padding)
            cost = BatchCost.measured(points)
            self.measured[instance] = self._by_length(cost)
            extra = {
                "model": self._config.name,
                "token_budget": cost.budget,
                "overhead_tokens": round(cost.overhead),
                "tokens_per_second": {each.tokens: round(each.rate) for each in points},
            }
            log.info("batches measured", extra=extra)

    def forget(self, instance: Instance) -> None:
        """Delete the rules of an instance."""
        self.measured.pop(instance, None)

    def _by_length(self, cost: BatchCost) -> Batching:
        return LengthBatching(self._config, self._batching, cost)
