"""The predicted wait of a request for its first response: a fluid model of a fair queue.

Service is a request's estimated cost, in any unit: waits depend on ratios only. Times are seconds
of one clock, which callers pass.
"""

import math
from collections.abc import Callable

from gateway.schedulers.shares import Mean

HALF_LIFE_SECS = 10.0
LEARNT_ENDS = 20
LEARNT_SECS = 10.0
"""Waits are known after that number of ends, or that time with requests that wait."""
CAUTION = 0.9
"""The part of a deadline that a predicted wait may take."""
STEP, ABOVE, BELOW = 0.02, 0.9, 0.1
"""`Correction` rises by STEP * ABOVE, and falls by STEP * BELOW."""
MOST_CORRECTION = 4.0
REACH = 4.0
"""The standard deviations from the mean of prompts up to which their line is known."""
RAREST = 0.003
"""The part of prompts that are as long as the longest for which the line is known."""


class Prefill:
    """The time to the first response as a line over the tokens of prompts.

    Moving means, variance and covariance give its slope: the mean of seconds per token would take
    the constant part of short prompts for a time of each token. The slope is that of 300
    prompts, since few of them may be long, and the height that of the latest ones. A prompt far
    beyond those that were seen counts as the longest of them: short ones tell little of it.
    """

    __slots__ = (
        "_count",
        "_covariance",
        "_latest_secs",
        "_latest_tokens",
        "_longest",
        "_secs",
        "_tokens",
        "_variance",
    )

    def __init__(self) -> None:
        self._count = 0
        self._latest_secs, self._latest_tokens = Mean(), Mean()
        self._secs = self._tokens = self._variance = self._covariance = self._longest = 0.0

    def learn(self, secs: float, tokens: float) -> None:
        """Learn the time of one prompt."""
        self._count += 1
        self._latest_secs.add(secs)
        self._latest_tokens.add(tokens)
        weight = max(RAREST, 1 / self._count)
        by_secs, by_tokens = secs - self._secs, tokens - self._tokens
        self._secs += weight * by_secs
        self._tokens += weight * by_tokens
        rest = 1 - weight
        self._variance = rest * (self._variance + weight * by_tokens * by_tokens)
        self._covariance = rest * (self._covariance + weight * by_tokens * by_secs)
        faded = self._longest + RAREST * (self._tokens - self._longest)
        self._longest = max(tokens, faded)

    def secs(self, tokens: float) -> float:
        """The expected time of a prompt of that many tokens."""
        slope = max(0.0, self._covariance / self._variance) if self._variance else 0.0
        most = max(self._longest, self._tokens + REACH * math.sqrt(self._variance))
        beyond = min(tokens, most) - self._latest_tokens.value
        return max(0.0, self._latest_secs.value + slope * beyond)


class Correction:
    """The 90 % quantile of real waits per predicted one, from 1 to 4, by a stochastic step each."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0

    def learn(self, ratio: float) -> None:
        """Learn the ratio of a real wait to the wait that was predicted without correction."""
        change = STEP * (ABOVE if ratio > self.value else -BELOW)
        self.value = min(MOST_CORRECTION, max(1.0, self.value + change))


class Drain:
    """The service per second and the time between ends while a model is full."""

    __slots__ = ("_ends", "_secs", "_service", "busy_secs")

    def __init__(self) -> None:
        self.busy_secs = 0.0
        self._secs = self._service = self._ends = 0.0

    def passed(self, secs: float) -> None:
        """Time has passed while the model was full."""
        kept = 0.5 ** (secs / HALF_LIFE_SECS)
        self._secs = self._secs * kept + secs
        self._service *= kept
        self._ends *= kept
        self.busy_secs += secs

    def served(self, service: float) -> None:
        """A request that has waited got its first response."""
        self._service += service

    def ended(self) -> None:
        """A request that was executed has ended."""
        self._ends += 1

    @property
    def secs_per_service(self) -> float:
        """The seconds of one unit of service; 0 if unknown."""
        return self._secs / self._service if self._service else 0.0

    @property
    def gap_secs(self) -> float:
        """The mean time between ends; 0 if unknown."""
        return self._secs / self._ends if self._ends else 0.0


class WaitPrediction:
    """The requests of one model that have no first response yet, and the waits that they cause.

    `room` is the number of requests, or rows of batches, that it executes at once, None if unknown.
    Then it is full while any has no response. A request takes `places` of it, which `in_flight` and
    `unanswered` count. `weight_of` gives the weight of a tenant; if the queue is not fair, callers
    pass the same tenant for all. A fair queue releases `slack` requests more than the room.
    Corrections are kept by the label of a tenant, of which there are few.
    """

    def __init__(
        self, weight_of: Callable[[str], float], label_of: Callable[[str], str] = str
    ) -> None:
        self.room: int | None = None
        self.slack = 0
        self.in_flight = self.unanswered = self.ends = 0
        self.output_tokens, self.token_secs = Mean(), Mean()
        self._weight_of, self._label_of = weight_of, label_of
        self._booked: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._corrections: dict[str, Correction] = {}
        self._drain = Drain()
        self._prefill = Prefill()
        self._now = 0.0

    def is_full(self, places: int = 1) -> bool:
        """Whether a further request with as many places has to wait for the end of another one."""
        if self.room is None or not self.in_flight:
            return self.unanswered > 0
        return self.in_flight + places > self.room

    @property
    def learnt(self) -> bool:
        """Whether enough was seen to refuse a request."""
        return self.ends >= LEARNT_ENDS or self._drain.busy_secs >= LEARNT_SECS

    def arrive(self, tenant: str, service: float, now: float, places: int = 1) -> None:
        """A request was accepted; `begin` or `leave` follows, and `end` after `begin`."""
        self._pass(now)
        self.in_flight += places
        self.unanswered += places
        if tenant not in self._booked:
            self._weights[tenant] = self._weight_of(tenant)
        self._booked[tenant] = self._booked.get(tenant, 0.0) + service
        self._counts[tenant] = self._counts.get(tenant, 0) + 1

    def begin(self, tenant: str, service: float, now: float, places: int = 1) -> None:
        """A request got its first response."""
        self._pass(now)
        if self.is_full():
            self._drain.served(service)
        self._answer(tenant, service, places)

    def leave(self, tenant: str, service: float, now: float, places: int = 1) -> None:
        """A request ended without a response."""
        self._pass(now)
        self.in_flight -= places
        self._answer(tenant, service, places)

    def end(self, now: float, places: int = 1) -> None:
        """A request that had a response ended."""
        self._pass(now)
        if self.is_full():
            self._drain.ended()
        self.in_flight -= places
        self.ends += 1

    def learn_prefill(self, secs: float, tokens: float) -> None:
        """Learn the time to the first response of a request that did not have to wait."""
        self._prefill.learn(max(0.0, secs - self.token_secs.value), tokens)

    def expire(self, tenant: str, service: float, now: float, places: int = 1) -> None:
        """As `leave`, at the deadline of the request: waits are as long as that."""
        self.leave(tenant, service, now, places)
        self.ends += 1

    def learn_wait(self, tenant: str, real: float, raw: float) -> None:
        """Learn the real wait of a request, or so far of one that left, and its `raw_wait`."""
        if raw > 0:
            label = self._label_of(tenant)
            if label not in self._corrections:
                self._corrections[label] = Correction()
            self._corrections[label].learn(real / raw)

    def correction(self, tenant: str) -> float:
        """The factor of the waits of a tenant."""
        found = self._corrections.get(self._label_of(tenant))
        return 1.0 if found is None else found.value

    def raw_wait(self, tenant: str, prompt_tokens: float, now: float, places: int = 1) -> float:
        """The predicted seconds to the first response of a request that would arrive now."""
        self._pass(now)
        wait = self._prefill.secs(prompt_tokens) + self.token_secs.value
        if self.is_full(places):
            wait += (1 + self.slack) * self._drain.gap_secs
            wait += self._share() * self._ahead(tenant) * self._drain.secs_per_service
        return wait

    def answer_secs(self, most_tokens: float | None = None) -> float:
        """The expected time from the first response to the last."""
        return self.expected_tokens(most_tokens) * self.token_secs.value

    def expected_tokens(self, most: float | None = None) -> float:
        """The expected tokens of an answer; `most` is its limit."""
        found = self.output_tokens.value
        return found if most is None else min(found, most)

    def _answer(self, tenant: str, service: float, places: int) -> None:
        self.unanswered -= places
        self._counts[tenant] -= 1
        self._booked[tenant] -= service
        if not self._counts[tenant]:
            del self._counts[tenant], self._booked[tenant], self._weights[tenant]

    def _pass(self, now: float) -> None:
        """Count the time since the last event; a clock that goes back counts nothing."""
        passed, self._now = now - self._now, max(now, self._now)
        if passed > 0 and self.is_full():
            self._drain.passed(passed)

    def _share(self) -> float:
        """The part of the booked service that is not executed yet."""
        if self.room is None or not self.unanswered:
            return 1.0
        return min(1.0, max(0, self.in_flight - self.room) / self.unanswered)

    def _ahead(self, tenant: str) -> float:
        """The service in front of a request that would arrive now."""
        own, weight = self._booked.get(tenant, 0.0), self._weight_of(tenant)
        if weight <= 0:
            return sum(self._booked.values())  # it is served while no other tenant waits
        if len(self._booked) < 2:
            return own
        total, level = 0.0, own / weight
        for each, other in zip(self._booked.values(), self._weights.values(), strict=True):
            most = level * other  # as `min`, without a call for each tenant
            total += each if each < most else most
        return total
