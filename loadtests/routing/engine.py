"""A simulated replica: an engine of LLMs with chunked prefill, a cache of blocks, and its reports.

Step by step: a step computes up to 2,048 prompt tokens and one token of each running answer.
Requests are admitted in order, as soon as their blocks fit; running ones are never preempted.
"""

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from gateway.fleet.choice import Load, ReplicaState
from gateway.fleet.prefixes import HeldPrefixes
from loadtests.routing.workload import BLOCK_TOKENS, Prompt

PREFILL_RATE = 12_000.0
STEP_SECS, STEP_SECS_OF_SEQUENCE = 0.008, 0.00004
CHUNK_TOKENS = 2048
BLOCKS = 800
MOST_IN_FLIGHT = 1024
RATE_SECS = 10.0


@dataclass(slots=True, eq=False)
class Served:
    """A request at an engine; times are 0 until they are known."""

    prompt: Prompt
    router: int
    call: int
    sent_at: float = 0.0
    ahead: int = 0
    cached: int = 0
    remaining: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    moves: int = 0


class BlockCache:
    """The blocks of an engine: those of running requests, and idle ones by their last use."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._used: dict[bytes, int] = {}
        self._answers = 0
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    @property
    def used_share(self) -> float:
        """The share of blocks that cannot be evicted."""
        return min(1.0, (len(self._used) + self._answers) / self.blocks)

    def matched(self, keys: tuple[bytes, ...]) -> int:
        """The number of leading blocks in the cache."""
        for number, key in enumerate(keys):
            if key not in self._used and key not in self._idle:
                return number
        return len(keys)

    def take(self, served: Served) -> bool:
        """Take the blocks of a request; False if they do not fit now."""
        prompt = served.prompt
        answers = prompt.blocks - len(prompt.keys)
        new = sum(key not in self._used for key in prompt.keys)
        if self._used and len(self._used) + self._answers + new + answers > self.blocks:
            return False
        served.cached = self.matched(prompt.keys)
        self._answers += answers
        for key in prompt.keys:
            self._used[key] = self._used.get(key, 0) + 1
            self._idle.pop(key, None)
        while self._idle and len(self._used) + self._answers + len(self._idle) > self.blocks:
            self._idle.popitem(last=False)
        return True

    def release(self, served: Served) -> None:
        """The blocks of a request are idle; the end of its prompt is evicted first."""
        prompt = served.prompt
        self._answers -= prompt.blocks - len(prompt.keys)
        for key in reversed(prompt.keys):
            self._used[key] -= 1
            if not self._used[key]:
                del self._used[key]
                self._idle[key] = None


class Engine:
    """One replica. `ends_at` is the end of the present steps; infinite while it is idle."""

    def __init__(self, routers: int, *, blocks: int = BLOCKS) -> None:
        self.cache = BlockCache(blocks)
        self.prefixes = HeldPrefixes(blocks)
        self.queued: deque[Served] = deque()
        self.prefilling: deque[Served] = deque()
        self.seen = [0] * routers
        self.ends_at = math.inf
        self._running: list[tuple[int, int, Served]] = []
        self._steps = 0
        self._count = 0
        self._began, self._chunk, self._planned = 0.0, 0, 0
        self._rates: deque[tuple[float, int, float]] = deque()

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self.queued) + len(self.prefilling) + len(self._running)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens to compute, counted anew from the requests."""
        begun = sum(each.remaining for each in self.prefilling)
        return begun + sum(map(self.tokens_of, self.queued))

    def tokens_of(self, served: Served) -> int:
        """The prompt tokens of a request that are not in the cache now."""
        prompt = served.prompt
        return max(1, prompt.tokens - self.cache.matched(prompt.keys) * BLOCK_TOKENS)

    def recall(self, served: Served) -> bool:
        """Give a request up that has not begun; False if it has."""
        if served not in self.queued:
            return False
        self.queued.remove(served)
        return True

    def push(self, served: Served, now: float) -> None:
        """A request arrives; decoding without a prefill stops after its present step."""
        self.seen[served.router] = served.call
        self.queued.append(served)
        if self.ends_at == math.inf:
            self._begin(now)
        elif not self._chunk:
            secs = self._step_secs()
            done = min(self._planned, max(1, math.ceil((now - self._began) / secs)))
            self._planned, self.ends_at = done, self._began + done * secs

    def advance(self) -> list[Served]:
        """End the present steps and begin the next; return the requests that ended."""
        now = self.ends_at
        self._steps += self._planned
        self._compute(now)
        ended = []
        while self._running and self._running[0][0] <= self._steps:
            served = heapq.heappop(self._running)[2]
            served.last_at = now
            self.cache.release(served)
            ended.append(served)
        self._begin(now)
        return ended

    def load(self, router: int, now: float) -> Load:
        """The load for one router."""
        while self._rates and self._rates[0][0] < now - RATE_SECS:
            self._rates.popleft()
        secs = sum(each[2] for each in self._rates)
        rate = sum(each[1] for each in self._rates) / secs if secs else PREFILL_RATE
        return Load(
            seen=self.seen[router],
            waiting_tokens=self.waiting_tokens,
            running=len(self._running),
            queued=len(self.queued),
            prefill_rate=rate,
            step_secs=self._step_secs(),
            kv_used=self.cache.used_share,
            room=max(0, MOST_IN_FLIGHT - self.in_flight),
            state=ReplicaState.READY,
        )

    def _step_secs(self) -> float:
        return STEP_SECS + STEP_SECS_OF_SEQUENCE * len(self._running)

    def _begin(self, now: float) -> None:
        """Plan a step with a chunk of prefill, or steps until an answer ends."""
        self._began, self._chunk, self._planned = now, 0, 1
        self._admit()
        if self.prefilling:
            self._chunk = min(CHUNK_TOKENS, sum(each.remaining for each in self.prefilling))
            secs = self._step_secs() + self._chunk / PREFILL_RATE
            self._rates.append((now, self._chunk, secs))
            self.ends_at = now + secs
        elif self._running:
            self._planned = self._running[0][0] - self._steps
            self.ends_at = now + self._planned * self._step_secs()
        else:
            self.ends_at = math.inf

    def _admit(self) -> None:
        """Take queued requests for a chunk, in their order."""
        tokens = sum(each.remaining for each in self.prefilling)
        while self.queued and tokens < CHUNK_TOKENS:
            served = self.queued[0]
            expected = self.prefixes.matched(served.prompt.keys)
            if not self.cache.take(served):
                return
            self.queued.popleft()
            self._correct(served, expected)
            served.remaining = max(1, served.prompt.tokens - served.cached * BLOCK_TOKENS)
            tokens += served.remaining
            self.prefilling.append(served)

    def _correct(self, served: Served, expected: int) -> None:
        prompt = served.prompt
        self.prefixes.correct(
            prompt.keys,
            expected=expected,
            cached_tokens=served.cached,
            prompt_tokens=len(prompt.keys),
        )
        self.prefixes.use(prompt.keys)

    def _compute(self, now: float) -> None:
        """The chunk is computed: requests whose prompt is complete have their first token."""
        left = self._chunk
        while left and self.prefilling:
            served = self.prefilling[0]
            computed = min(left, served.remaining)
            served.remaining -= computed
            left -= computed
            if served.remaining:
                return
            self.prefilling.popleft()
            served.first_at = now
            self._count += 1
            ends = self._steps + served.prompt.answer - 1
            heapq.heappush(self._running, (ends, self._count, served))
