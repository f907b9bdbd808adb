"""An anytime-valid test: an event is more frequent in one arm than in the other."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

RATIOS = (1.5, 2.0, 4.0, 8.0, 16.0, 64.0)
"""The alternatives: the rate of one arm over that of the other."""
LEAST_RATE, HIGHEST_RATE = 1e-6, 0.5
"""The bounds of the rate that is expected of the reference."""
DEVIATIONS = 1.96
"""Standard deviations of the intervals that are shown: 95 %."""


class Counts(NamedTuple):
    """Requests of one arm, and the events among them."""

    requests: float = 0
    events: float = 0

    @property
    def rate(self) -> float:
        """Events per request; 0 without requests."""
        return self.events / self.requests if self.requests else 0.0

    def plus(self, other: "Counts") -> "Counts":
        """The sum of both."""
        return Counts(self.requests + other.requests, self.events + other.events)

    def interval(self) -> tuple[float, float]:
        """Wilson's interval of the rate, for reading only: no decision depends on it."""
        if not self.requests:
            return 0.0, 1.0
        share = DEVIATIONS**2 / self.requests
        middle = (self.rate + share / 2) / (1 + share)
        spread = math.sqrt(self.rate * (1 - self.rate) * share + share**2 / 4) / (1 + share)
        return max(0.0, middle - spread), min(1.0, middle + spread)

    @property
    def shown(self) -> str:
        """Both counts and the rate in words."""
        return f"{self.events:g} of {self.requests:g} requests ({self.rate:.2%})"

    def described(self) -> dict[str, float]:
        """The counts, the rate and its interval as members of JSON."""
        low, high = self.interval()
        found = {"requests": self.requests, "events": self.events, "rate": self.rate}
        return {**found, "low": low, "high": high}


class SequentialTest:
    """Evidence that the events of the `tested` arm are more frequent than those of the reference.

    With `most` the reference is that rate instead of an arm. If the rates are equal, `log_e` ever
    reaches ln(1/a) with probability at most a: whenever it is read, however the rate changes
    between blocks, and however requests are assigned to the arms. A block without requests of one
    arm changes nothing.
    """

    def __init__(self, most: float | None = None) -> None:
        self.most = most
        self.reference = Counts()
        self.tested = Counts()
        self._logs = [0.0] * len(RATIOS)

    def add(self, reference: Counts, tested: Counts) -> None:
        """Add one block. Blocks come in the order of their requests' admission."""
        grown = (self._growth(ratio, reference, tested) for ratio in RATIOS)
        self._logs = [log + more for log, more in zip(self._logs, grown, strict=True)]
        self.reference, self.tested = self.reference.plus(reference), self.tested.plus(tested)

    @property
    def log_e(self) -> float:
        """The logarithm of the evidence: the mean of that of each alternative."""
        largest = max(self._logs)
        total = sum(math.exp(log - largest) for log in self._logs)
        return largest + math.log(total / len(RATIOS))

    @property
    def ratio(self) -> float:
        """The observed ratio of the rates; infinite if the reference has no event."""
        rate = self.reference.rate if self.most is None else self.most
        return self.tested.rate / rate if rate else math.inf if self.tested.events else 0.0

    def shown_ratio(self, limit: float) -> float | None:
        """The smallest alternative for which the requests so far would have reached a `log_e`."""
        rate, enough = self._rate, limit + math.log(len(RATIOS))
        reference = Counts(self.reference.requests, self.reference.requests * rate)
        for ratio in RATIOS:
            events = self.tested.requests * _raised(rate, ratio)
            if self._growth(ratio, reference, Counts(self.tested.requests, events)) >= enough:
                return ratio
        return None

    def dump(self) -> dict[str, Any]:
        """The state as members of JSON."""
        return {"logs": self._logs, "reference": self.reference, "tested": self.tested}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `dump`; ValueError if it is none."""
        logs = [float(each) for each in state["logs"]]
        if len(logs) != len(RATIOS) or not all(map(math.isfinite, logs)):
            raise ValueError(f"the state has {len(logs)} logs, expected {len(RATIOS)} numbers")
        self._logs = logs
        self.reference, self.tested = Counts(*state["reference"]), Counts(*state["tested"])

    @property
    def _rate(self) -> float:
        """The rate that is expected of the reference in the next block."""
        if self.most is not None:
            return self.most
        seen = (self.reference.events + 0.5) / (self.reference.requests + 1)
        return min(max(seen, LEAST_RATE), HIGHEST_RATE)

    def _growth(self, ratio: float, reference: Counts, tested: Counts) -> float:
        low = self._rate
        high = _raised(low, ratio)
        if self.most is not None:
            return _log_likelihood(tested, high, low)
        requests = tested.requests + reference.requests
        if not requests:
            return 0.0
        common = (tested.requests * high + reference.requests * low) / requests
        return _log_likelihood(tested, high, common) + _log_likelihood(reference, low, common)


def _raised(rate: float, ratio: float) -> float:
    return min(ratio * rate, 0.5 + rate / 2)


def _log_likelihood(counts: Counts, rate: float, common: float) -> float:
    """The logarithm of the ratio of the likelihoods of two rates."""
    others = counts.requests - counts.events
    return counts.events * math.log(rate / common) + others * math.log((1 - rate) / (1 - common))
