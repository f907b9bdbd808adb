"""The load of one model of a replica, and the prefixes of prompts that its engine holds."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from gateway.backend import Instance
from gateway.fleet.choice import LIMITS, MOST_REQUESTS, MOST_TOKENS, Load
from gateway.fleet.keys import PIECE_BYTES
from gateway.fleet.offers import FIRST_STEP_SECS, load_of_requests
from gateway.fleet.prefixes import CAPACITY_RANGE, MOST_KEYS_OF_REPLICA, HeldPrefixes, KeyChanges
from gateway.messages import InferResponse, RoutedPrompt
from gateway.models.model import Model
from gateway.models.sharing import most_of_all
from gateway.schedulers.token_ratio import TokenRatio

WINDOW_SECS = 10.0
"""The length of the time that a rate or a mean of a load is about."""
GAUGE_SECS = 5.0
"""The shortest time between two readings of an engine's gauges, which take milliseconds."""
CACHE_TOKENS = 1 << 19
"""The size of the prefix cache of an engine that does not report one."""
KV_USED = "vllm:kv_cache_usage_perc"
CACHE_SIZE = "vllm:cache_config_info"
"""Gauges: the share of KV blocks in use, and the cache's configuration, in its labels."""
NO_CHANGES = KeyChanges()


class GrowthQuotient:
    """The quotient of two growing sums, by their growth within the window."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque()

    def at(self, now: float, dividend: float, divisor: float) -> float | None:
        """The quotient with the present sums; None if the divisor has not grown."""
        samples = self._samples
        samples.append((now, dividend, divisor))
        while len(samples) > 2 and samples[1][0] < now - WINDOW_SECS:
            samples.popleft()
        _, first_dividend, first_divisor = samples[0]
        grown = divisor - first_divisor
        return (dividend - first_dividend) / grown if grown else None


class LoadMeter:
    """The load of one loaded model: counts of its requests, their tokens, and their durations.

    Tokens are counted once a prompt of a router has been computed. Without them every request in
    flight counts as queued, because engines do not report their queues.
    """

    def __init__(
        self,
        model: Model,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self._on_change = on_change
        self._clock = clock
        self._durations, self._prefills, self._steps = (GrowthQuotient() for _ in range(3))
        self._ratio = TokenRatio()
        self._waiting: dict[MeteredPrompt, None] = {}
        self._prefixes: HeldPrefixes | None = None
        self._instances: list[Instance] = []
        self._computed_tokens = 0
        self._waiting_secs = 0.0
        self._counted_at = 0.0
        self._prefill_rate = 0.0
        self._step_secs = FIRST_STEP_SECS
        self._kv_used, self._gauges_at = 0.0, -GAUGE_SECS
        self._last_inference_ms, self._used_at = 0, -math.inf
        self._prefills.at(clock(), 0, 0)

    @property
    def has_tokens(self) -> bool:
        """Whether its load is in tokens."""
        return self._prefill_rate > 0

    def begin(self, prompt: RoutedPrompt) -> "MeteredPrompt":
        """Count a prompt as waiting, until its request has a response or ends."""
        if not self._waiting:
            self._counted_at = self._clock()
        metered = MeteredPrompt(self, prompt, self._held().matched(prompt.keys))
        self._waiting[metered] = None
        return metered

    def end(self, metered: "MeteredPrompt") -> None:
        """Count a prompt no longer: its request has ended."""
        self._waiting.pop(metered, None)

    def respond(self, metered: "MeteredPrompt", response: InferResponse) -> None:
        """Count the prompt of a response as computed, and learn from its usage."""
        usage, prompt = response.usage, metered.prompt
        if usage is not None:
            self._ratio.learn(prompt.size_bytes, usage.prompt_tokens)
        if metered not in self._waiting:
            return
        now, held = self._clock(), self._held()
        self._waiting_secs += now - self._counted_at
        self._counted_at = now
        del self._waiting[metered]
        expected = held.matched(prompt.keys)
        if usage is None or not usage.prompt_tokens or usage.cached_tokens is None:
            computed = self._to_compute(prompt)
        else:
            computed = max(1, usage.prompt_tokens - usage.cached_tokens)
            if expected == metered.expected:
                held.correct(
                    prompt.keys,
                    expected=expected,
                    cached_tokens=usage.cached_tokens,
                    prompt_tokens=usage.prompt_tokens,
                )
        held.use(prompt.keys)
        self._computed_tokens += computed
        self._prefill_rate = self._rate(now) or self._prefill_rate
        self._on_change()

    def idle_secs(self) -> float:
        """The time since a call of this function that saw a further execution."""
        now, last = self._clock(), self.model.statistics.last_inference_ms
        if last != self._last_inference_ms:
            self._last_inference_ms, self._used_at = last, now
        return now - self._used_at

    def load(self) -> Load:
        """The present load, for a router without calls."""
        in_flight, waiting = len(self.model.requests), len(self._waiting)
        most = most_of_all(self.model.fair, self.model.most_in_flight)
        room = max(0, min(MOST_REQUESTS, most - in_flight))
        now = self._clock()
        if not self.has_tokens:
            secs = self._duration_secs(now)
            return load_of_requests(queued=in_flight, step_secs=secs, room=room)
        self._read_gauges(now)
        tokens = sum(self._to_compute(each.prompt) for each in self._waiting)
        return replace(
            load_of_requests(queued=waiting, step_secs=self._token_secs(now), room=room),
            waiting_tokens=min(tokens, MOST_TOKENS),
            running=max(0, in_flight - waiting),
            prefill_rate=self._prefill_rate,
            kv_used=self._kv_used,
        )

    def take_prefixes(self) -> KeyChanges:
        """The changes of the prefixes since the last call."""
        held = self._prefixes
        if held is None:
            return NO_CHANGES
        instances = list(self.model.instances)
        if instances != self._instances:  # the caches of new ones are empty
            self._instances = instances
            held.clear()
        return held.take_changes()

    def all_prefixes(self) -> KeyChanges:
        """All prefixes, for a router that knows others or none; after `take_prefixes`."""
        held = self._prefixes
        return KeyChanges(reset=True) if held is None else held.everything()

    def _held(self) -> HeldPrefixes:
        """The prefixes; those of the first prompt have a list of the size of the engine's cache."""
        if self._prefixes is None:
            self._instances = list(self.model.instances)
            tokens = sum(map(_cache_tokens, self._instances)) or CACHE_TOKENS
            keys = round(tokens / self._key_tokens)
            self._prefixes = HeldPrefixes(min(keys, MOST_KEYS_OF_REPLICA // CAPACITY_RANGE))
        return self._prefixes

    @property
    def _key_tokens(self) -> float:
        return PIECE_BYTES * self._ratio.value

    def _to_compute(self, prompt: RoutedPrompt) -> int:
        """The expected tokens of a prompt that are not in the cache."""
        cached = self._held().matched(prompt.keys) * self._key_tokens
        return max(1, self._ratio.tokens(prompt.size_bytes) - round(cached))

    def _rate(self, now: float) -> float:
        """Tokens computed in a second while any waited, until the latest first response."""
        found = self._prefills.at(now, self._computed_tokens, self._waiting_secs) or 0.0
        return min(found, LIMITS["prefill_rate"])

    def _token_secs(self, now: float) -> float:
        """The mean time between two tokens of a request; the last known one."""
        gaps = self.model.statistics.inter_token
        found = self._steps.at(now, gaps.total, sum(gaps.counts))
        if found is not None:
            self._step_secs = min(LIMITS["step_secs"], found)
        return self._step_secs

    def _duration_secs(self, now: float) -> float:
        """The mean duration of the requests that ended within the window, without their waits.

        The same for all replicas of an engine: lengths of answers say nothing about its speed.
        """
        if any(instance.concurrency is None for instance in self.model.instances):
            return FIRST_STEP_SECS
        statistics = self.model.statistics
        ns = statistics.success.ns - statistics.queue.ns
        found = self._durations.at(now, ns / 1e9, statistics.success.count)
        return FIRST_STEP_SECS if found is None else min(LIMITS["step_secs"], max(0.0, found))

    def _read_gauges(self, now: float) -> None:
        if now - self._gauges_at >= GAUGE_SECS:
            self._gauges_at = now
            used = (_gauge(each, KV_USED) for each in self.model.instances)
            self._kv_used = min(1.0, max(used, default=0.0))


class MeteredPrompt:
    """The prompt of one request in flight; `expected` are its keys in the cache at arrival."""

    __slots__ = ("_meter", "expected", "prompt")

    def __init__(self, meter: LoadMeter, prompt: RoutedPrompt, expected: int) -> None:
        self._meter = meter
        self.prompt = prompt
        self.expected = expected

    def respond(self, response: InferResponse) -> None:
        """Note a response of the request."""
        self._meter.respond(self, response)

    def end(self) -> None:
        """Note the end of the request."""
        self._meter.end(self)


def _gauge(instance: Instance, name: str) -> float:
    """A gauge of an engine; 0 if it has none. The families behind it are not collected."""
    for family in instance.metrics:
        for sample in family.samples:
            if sample.name == name:
                return max(0.0, float(sample.value))
    return 0.0


def _cache_tokens(instance: Instance) -> int:
    """The size of an engine's prefix cache in tokens; 0 if it is not reported, 1 without one."""
    for family in instance.metrics:
        for sample in family.samples:
            if sample.name == CACHE_SIZE:
                if sample.labels.get("enable_prefix_caching") == "False":
                    return 1
                sizes = (sample.labels.get(each, "") for each in ("num_gpu_blocks", "block_size"))
                return math.prod(int(each) if each.isdecimal() else 0 for each in sizes)
    return 0
