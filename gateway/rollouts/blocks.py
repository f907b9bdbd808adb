"""The requests of a rollout in blocks by their admission, and the counts of guardrails there."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from gateway.errors import InferenceError
from gateway.rollouts.guardrails import DIFFERS, EMPTY, NAN, Guardrail, Guardrails
from gateway.rollouts.observation import Arm, Observation
from gateway.rollouts.sequential_test import Counts

NS_PER_SEC = 1_000_000_000
BLOCK_NS = NS_PER_SEC
BLOCK_REQUESTS = 20
"""A block has at least that many requests, and lasts at least that long."""
HORIZON_NS = 30 * NS_PER_SEC
"""The time from the last admission to a block until its undecided requests count as no event."""
MOST_OBSERVED, MOST_TOKENS = 250, 5000
"""Requests of each arm, and their tokens, that are observed in a second; more are sampled."""
SHORT_BLOCK_NS, SHORT_BLOCK_REQUESTS = BLOCK_NS // 4, 2 * MOST_OBSERVED
"""A block with that many observed requests of an arm may be that short: then fewer are sampled."""
SHARE_OF_KEY = 0.2
"""The largest share of the candidate's events that one key may have; further ones do not count."""
MOST_KEYS = 10_000
"""Keys whose events are counted; then the half whose last events are older is forgotten."""
WINDOW, LEAST_WINDOW = 1000, 50
"""Stable's latest requests, whose quantiles are limits, and the fewest for a limit."""
FIRST_FAILURES = 5
"""The candidate is dead on arrival if that many requests fail before one succeeds.

With that many since its last complete request it passes no step.
"""


class BlockReader(Protocol):
    """Takes the counts of the blocks."""

    def add(self, at: int, stable: Counts, candidate: Counts) -> None:
        """Take the next block of a guardrail, by its place among those that are tested."""

    def arrived(self) -> None:
        """Take that FIRST_FAILURES requests of the candidate have failed before one succeeded."""


class Block:
    """The requests admitted in about a second, with the limits of that time.

    `limits` are those of each guardrail: NaN if there is none. `left` are the guardrails to judge.
    """

    __slots__ = ("began_ns", "counts", "events", "is_closed", "last_ns", "left", "limits", "open")

    def __init__(self, began_ns: int, limits: Sequence[float], left: Sequence[int]) -> None:
        self.began_ns = self.last_ns = began_ns
        self.limits = limits
        self.left = list(left)
        self.is_closed = False
        self.counts = [0] * len(Arm)
        self.events: list[list[Observation]] = [[] for _ in limits]
        self.open: set[Observation] = set()

    def is_full(self, now_ns: int) -> bool:
        """Whether the next request begins another block."""
        elapsed_ns = now_ns - self.began_ns
        if elapsed_ns >= BLOCK_NS:
            return sum(self.counts) >= BLOCK_REQUESTS
        return elapsed_ns >= SHORT_BLOCK_NS and max(self.counts) >= SHORT_BLOCK_REQUESTS


class RequestBlocks:
    """Implements `Observer`. Call `count` once a second; times are of `time.perf_counter_ns`.

    A request is observed if its stream's recorder is made by its `tap`. Failed first requests of
    one key count once. Keys are digests: nothing of a client is kept.
    """

    def __init__(self, guardrails: Guardrails, reader: BlockReader) -> None:
        self.guardrails = guardrails
        self.ended = [0] * len(Arm)
        """The observed requests of each arm that were answered, or failed by the server's fault."""
        self.failures = 0
        """Failed requests of the candidate, and copies, since its last complete one."""
        self.has_arrived = False
        """Whether the first requests of the candidate have ended well, or not."""
        self.first_failures: set[object] = set()
        """Its first failures, by their keys, before that."""
        names = {each.name for each in guardrails.tested}
        self.reads_content, self.reads_numbers = EMPTY in names, NAN in names
        self._reader = reader
        self._happened = [(at, each.kind.happened) for at, each in enumerate(guardrails.tested)]
        self._windows: dict[Any, deque[float]] = {
            each.kind.measure: deque(maxlen=WINDOW)
            for each in guardrails.tested
            if each.kind.measure is not None and each.limit is None
        }
        self._blocks: deque[Block] = deque()
        self._requests, self._tokens = [0] * len(Arm), [0] * len(Arm)
        self._skipped, self._refused = [0] * len(Arm), [0] * len(Arm)
        self._strides = [1] * len(Arm)
        self._began_ns = -NS_PER_SEC
        self._keys: list[dict[bytes, int]] = [{} for _ in guardrails.tested]
        self._candidate_events = [0] * len(guardrails.tested)

    def tap(self, arm: Arm, key: bytes = b"") -> Observation | None:
        """The tap of a request, None if it is not observed; `key` is what its version sticks to."""
        left = self._skipped[arm]
        if left:
            self._skipped[arm] = left - 1
            return None
        stride = self._strides[arm]
        self._skipped[arm] = stride - 1
        return Observation(self, arm, key, stride)

    def refuse(self, error: InferenceError, arm: Arm, key: bytes, now_ns: int) -> None:
        """Count a request that a version has refused, so that it has no stream."""
        self._refused[arm] += 1
        stride = self._strides[arm]
        if self._refused[arm] % stride:
            return
        refused = Observation(self, arm, key, stride)
        refused.admitted_ns = refused.received_ns = refused.ended_ns = now_ns
        self.admit(refused)
        refused.finish(error)

    # Observer.

    def admit(self, observation: Observation) -> None:
        """Add a request to the block of its admission."""
        now = observation.admitted_ns
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.is_closed or block.is_full(now):
            block = self._begin_block(now)
        block.last_ns = now
        block.counts[observation.arm] += 1
        self._requests[observation.arm] += observation.stands_for
        block.open.add(observation)
        observation.block = block

    def end(self, observation: Observation) -> None:
        """Keep the events of a request, and stable's values for the limits of later ones."""
        block: Block = observation.block
        block.open.discard(observation)
        now, limits = observation.ended_ns, block.limits
        for at, happened in self._happened:
            if happened(observation, limits[at], now):
                block.events[at].append(observation)
        arm = observation.arm
        self.ended[arm] += observation.complete or observation.failed
        self._tokens[arm] += observation.tokens * observation.stands_for
        if arm is not Arm.STABLE:
            self.failures = 0 if observation.complete else self.failures + observation.failed
            if not self.has_arrived:
                self._look_at_arrival(observation)
        elif observation.complete:
            for measure, window in self._windows.items():
                value = measure(observation, now)
                if value == value:
                    window.append(value)

    def withdraw(self, observation: Observation) -> None:
        """Take back an admitted request: it was not sent."""
        block: Block = observation.block
        if observation in block.open:
            block.open.remove(observation)
            block.counts[observation.arm] -= 1

    # Counts.

    def count(self, now_ns: int) -> None:
        """Pass the counts of the blocks that are decided to the reader."""
        if self._blocks and self._blocks[-1].is_full(now_ns):
            self._blocks[-1].is_closed = True
        waiting: set[int] = set()
        for block in self._blocks:
            if block.is_closed:
                self._judge(block, waiting, now_ns)
        while self._blocks and self._blocks[0].is_closed and not self._blocks[0].left:
            self._blocks.popleft()

    def _begin_block(self, now: int) -> Block:
        if self._blocks:
            self._blocks[-1].is_closed = True
        self._strides = [self._stride(arm, now) for arm in Arm]
        self._requests, self._tokens, self._began_ns = [0] * len(Arm), [0] * len(Arm), now
        sorted_windows = {measure: _sorted(window) for measure, window in self._windows.items()}
        limits = [_limit(each, sorted_windows) for each in self.guardrails.tested]
        left = [at for at, limit in enumerate(limits) if not math.isnan(limit)]
        block = Block(now, limits, left)
        self._blocks.append(block)
        return block

    def _stride(self, arm: Arm, now: int) -> int:
        """Every such request of an arm is observed in the next block."""
        secs = (now - self._began_ns) / NS_PER_SEC
        share = max(self._requests[arm] / MOST_OBSERVED, self._tokens[arm] / MOST_TOKENS)
        return max(1, math.ceil(share / secs))

    def _look_at_arrival(self, observation: Observation) -> None:
        if observation.complete:
            self.has_arrived = True
            self.first_failures.clear()
        elif observation.failed and len(self.first_failures) < FIRST_FAILURES:
            self.first_failures.add(observation.key or observation)
            if len(self.first_failures) == FIRST_FAILURES:
                self._reader.arrived()

    def _judge(self, block: Block, waiting: set[int], now_ns: int) -> None:
        """Judge a block by each guardrail that does not wait for an earlier block."""
        is_late = now_ns - block.last_ns > HORIZON_NS
        for at in tuple(block.left):
            if at in waiting:
                continue
            if is_late or self._is_decided(block, at, now_ns):
                block.left.remove(at)
                self._count(block, at, now_ns)
            else:
                waiting.add(at)

    def _is_decided(self, block: Block, at: int, now_ns: int) -> bool:
        kind, limit = self.guardrails.tested[at].kind, block.limits[at]
        return all(
            kind.decided(each, limit, now_ns) or (kind.of_time and each.arm is Arm.COPY)
            for each in block.open
        )

    def _count(self, block: Block, at: int, now_ns: int) -> None:
        guardrail = self.guardrails.tested[at]
        happened, limit = guardrail.kind.happened, block.limits[at]
        events = block.events[at] + [each for each in block.open if happened(each, limit, now_ns)]
        found = [0] * len(Arm)
        for each in sorted(events, key=_admission):
            found[each.arm] += self._counts(each, at)
        stable, candidate, copies = map(Counts, block.counts, found)
        if guardrail.name == DIFFERS:
            candidate = copies
        elif not guardrail.kind.of_time:
            candidate = candidate.plus(copies)
        self._reader.add(at, stable, candidate)

    def _counts(self, event: Observation, at: int) -> bool:
        """Whether an event counts; of the candidate's, those of one key are limited.

        Of stable's they are not: fewer events of stable would be evidence against the candidate.
        """
        if event.arm is Arm.STABLE:
            return True
        keys = self._keys[at]
        if event.key:
            of_key = keys.pop(event.key, 0)  # put back as the latest one
            is_counted = of_key < max(1, SHARE_OF_KEY * self._candidate_events[at])
            keys[event.key] = of_key + is_counted
            if len(keys) > MOST_KEYS:
                self._keys[at] = dict(islice(keys.items(), MOST_KEYS // 2, None))
            if not is_counted:
                return False
        self._candidate_events[at] += 1
        return True


def _admission(observation: Observation) -> int:
    return observation.admitted_ns


def _sorted(window: deque[float]) -> list[float]:
    """The values in order; none if there are too few."""
    return sorted(window) if len(window) >= LEAST_WINDOW else []


def _limit(guardrail: Guardrail, values: Mapping[Any, Sequence[float]]) -> float:
    """The limit of one guardrail in a block; NaN if stable has too few requests."""
    if guardrail.kind.measure is None or guardrail.limit is not None:
        return guardrail.limit or 0.0
    known = values[guardrail.kind.measure]
    if not known:
        return math.nan
    return known[int(guardrail.kind.quantile * len(known))] * guardrail.factor
