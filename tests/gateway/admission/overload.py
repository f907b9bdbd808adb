"""A simulation of an engine that batches in flight, behind a fair queue, under overload.

Steps take 12 ms, 0.4 ms for each sequence and 0.08 ms for each prompt token. Outputs have
exponential lengths. Events are discrete, and random numbers have a seed.
"""

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.admission.prediction import CAUTION, WaitPrediction

ROOM = 32
SLACK = 1
DEADLINE_SECS = 5.0
MEAN_PROMPT, MEAN_OUTPUT = 100, 150


@dataclass(eq=False)
class Job:
    """One request; `raw` is its predicted wait, and it `waited` if the engine was full."""

    tenant: str
    arrived: float
    prompt: int
    outputs: int
    left: int
    service: float
    raw: float = 0.0
    begun: bool = False
    waited: bool = False


@dataclass
class Outcome:
    """Counts of the requests of one tenant, and the ratios of real to predicted waits."""

    sent: int = 0
    in_time: int = 0
    late: int = 0
    refused: int = 0
    ratios: list[float] = field(default_factory=list)


class Overload:
    """Poisson arrivals of some tenants at an engine, for some time.

    `rates` are requests per second of each tenant. Without `admits` all are accepted.
    """

    def __init__(self, rates: Mapping[str, float], seed: int, *, admits: bool = True) -> None:
        self._random = random.Random(seed)
        self._rates = rates
        self._admits = admits
        self.prediction = WaitPrediction(lambda tenant: 1.0)
        self.prediction.room, self.prediction.slack = ROOM, SLACK
        self.outcomes = {name: Outcome() for name in rates}
        self._queues: dict[str, deque[Job]] = {name: deque() for name in rates}
        self._counters = dict.fromkeys(rates, 0.0)
        self._running: list[Job] = []
        self._next = {name: self._random.expovariate(rate) for name, rate in rates.items()}
        self._now = 0.0

    def run(self, secs: float) -> Mapping[str, Outcome]:
        """The outcomes of all requests that were sent in that time."""
        while self._now < secs:
            self._arrive()
            self._release()
            if self._running:
                self._step()
            else:
                self._now = min(self._next.values())
        return self.outcomes

    def _arrive(self) -> None:
        for name, rate in self._rates.items():
            while self._next[name] <= self._now:
                self._submit(name, self._next[name])
                self._next[name] += self._random.expovariate(rate)

    def _submit(self, tenant: str, now: float) -> None:
        prompt = 1 + int(self._random.expovariate(1 / MEAN_PROMPT))
        outputs = 1 + int(self._random.expovariate(1 / MEAN_OUTPUT))
        outcome, prediction = self.outcomes[tenant], self.prediction
        outcome.sent += 1
        expected = prediction.output_tokens.value or 0.0
        job = Job(tenant, now, prompt, outputs, outputs, prompt + 2 * expected)
        job.raw = prediction.raw_wait(tenant, prompt, now)
        wait = job.raw * prediction.correction(tenant)
        if self._admits and prediction.learnt and wait > CAUTION * DEADLINE_SECS:
            outcome.refused += 1
            return
        job.waited = prediction.is_full()
        prediction.arrive(tenant, job.service, now)
        if not self._queues[tenant]:
            others = [self._counters[name] for name, queue in self._queues.items() if queue]
            self._counters[tenant] = max(self._counters[tenant], min(others, default=0.0))
        self._queues[tenant].append(job)

    def _release(self) -> None:
        """Fill the engine; drop what has waited for the whole deadline."""
        for queue in self._queues.values():
            while queue and self._now - queue[0].arrived >= DEADLINE_SECS and self._admits:
                self._drop(queue.popleft())
        while len(self._running) < ROOM + SLACK:
            waiting = [name for name, queue in self._queues.items() if queue]
            if not waiting:
                return
            name = min(waiting, key=lambda each: self._counters[each])
            job = self._queues[name].popleft()
            self._counters[name] += job.service
            self._running.append(job)

    def _drop(self, job: Job) -> None:
        self.prediction.expire(job.tenant, job.service, self._now)
        self.prediction.learn_wait(job.tenant, self._now - job.arrived, job.raw)
        self.outcomes[job.tenant].late += 1

    def _step(self) -> None:
        """One step of the engine: a token for each of the first ROOM requests."""
        batch = self._running[:ROOM]
        prompts = sum(job.prompt for job in batch if not job.begun)
        took = (12 + 0.4 * len(batch) + 0.08 * prompts) / 1000
        self._now += took
        self.prediction.token_secs.add(took)
        for job in batch:
            if not job.begun:
                self._begin(job)
            job.left -= 1
            if not job.left:
                self._running.remove(job)
                self.prediction.output_tokens.add(job.outputs)
                self.prediction.end(self._now)

    def _begin(self, job: Job) -> None:
        job.begun = True
        outcome, real = self.outcomes[job.tenant], self._now - job.arrived
        self.prediction.begin(job.tenant, job.service, self._now)
        if job.waited:
            wait = job.raw * self.prediction.correction(job.tenant)
            outcome.ratios.append(real / wait if wait else 0.0)
            self.prediction.learn_wait(job.tenant, real, job.raw)
        else:
            self.prediction.learn_prefill(real, job.prompt)
        if real <= DEADLINE_SECS:
            outcome.in_time += 1
        else:
            outcome.late += 1
