"""The evidence of a rollout: the test of each guardrail, and breaches."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from gateway.rollouts.blocks import RequestBlocks
from gateway.rollouts.guardrails import GOLDEN, Guardrail, Guardrails
from gateway.rollouts.sequential_test import Counts, SequentialTest

LEAST_EVENTS = 3
GOLDEN_FAILURES = 2
LOG_10 = math.log(10)


@dataclass(frozen=True, slots=True)
class Breach:
    """A guardrail that does not hold; `reason` has the numbers."""

    guardrail: str
    reason: str


class GuardrailTests:
    """The tests of the guardrails of a rollout, and what they have decided.

    `alpha` is the probability that a candidate as good as stable ever breaches any guardrail.
    """

    def __init__(
        self, guardrails: Guardrails, alpha: float = 0.01, random: Random | None = None
    ) -> None:
        self.guardrails = guardrails
        self.limit = math.log(max(1, len(guardrails.tested)) / alpha)
        """The `log_e` of a breach."""
        self._random = random or Random()
        self._tests = [SequentialTest(each.most) for each in guardrails.tested]
        self._proofs = {name: SequentialTest() for name in guardrails.proofs}
        self._proof_limit = math.log(max(1, len(self._proofs)) / alpha)
        self._breached: set[str] = set()
        self._golden_failures = 0

    def add(self, at: int, stable: Counts, candidate: Counts) -> None:
        """Add a block to the test of a guardrail, by its place among those that are tested."""
        self._tests[at].add(stable, candidate)
        name = self.guardrails.tested[at].name
        if name in self._proofs:
            self._prove(name, stable, candidate)

    def golden(self, failure: str = "") -> Breach | None:
        """Count a golden request asked again; two failures in a row are a breach."""
        self._golden_failures = self._golden_failures + 1 if failure else 0
        if self._golden_failures < GOLDEN_FAILURES or GOLDEN in self._breached:
            return None
        self._breached.add(GOLDEN)
        return Breach(GOLDEN, failure)

    def breaches(self) -> list[Breach]:
        """The guardrails that are broken; each is returned once."""
        return [breach for at in range(len(self._tests)) if (breach := self._breach(at))]

    @property
    def suspicious(self) -> list[str]:
        """The guardrails with more than half of the evidence of a breach."""
        pairs = zip(self.guardrails.tested, self._tests, strict=True)
        return [each.name for each, test in pairs if test.log_e >= self.limit / 2]

    @property
    def unproven(self) -> list[str]:
        """The guardrails whose proof is demanded and is not there yet."""
        return [name for name, test in self._proofs.items() if test.log_e < self._proof_limit]

    def describe(self) -> list[dict[str, Any]]:
        """Each guardrail with its values and limits, as JSON; logarithms are of base 10."""
        pairs = zip(self.guardrails.tested, self._tests, strict=True)
        return [self._describe(each, test) for each, test in pairs]

    def dump(self) -> dict[str, Any]:
        """The state as members of JSON."""
        names = (each.name for each in self.guardrails.tested)
        return {
            "tests": {name: test.dump() for name, test in zip(names, self._tests, strict=True)},
            "proofs": {name: test.dump() for name, test in self._proofs.items()},
            "breached": sorted(self._breached),
            "golden_failures": self._golden_failures,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `dump` for the same guardrails; ValueError if it is none."""
        try:
            self._load(state)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the state of the evidence is not complete: {error!r}") from None

    def _load(self, state: Mapping[str, Any]) -> None:
        for each, test in zip(self.guardrails.tested, self._tests, strict=True):
            test.load(state["tests"][each.name])
        for name, test in self._proofs.items():
            test.load(state["proofs"][name])
        self._breached = set(map(str, state["breached"]))
        self._golden_failures = int(state["golden_failures"])

    def _prove(self, name: str, stable: Counts, candidate: Counts) -> None:
        """Test with the arms exchanged: the candidate's events, thinned, as the reference."""
        kept = 1 / self.guardrails.proofs[name]
        thinned = sum(self._random.random() < kept for _ in range(int(candidate.events)))
        self._proofs[name].add(Counts(candidate.requests, thinned), stable)

    def _breach(self, at: int) -> Breach | None:
        guardrail, test = self.guardrails.tested[at], self._tests[at]
        if (
            test.log_e < self.limit
            or test.tested.events < LEAST_EVENTS
            or test.ratio < guardrail.min_ratio
            or guardrail.name in self._breached
        ):
            return None
        self._breached.add(guardrail.name)
        stable = f"{test.reference.shown} of stable"
        expected = stable if guardrail.most is None else f"at most {guardrail.most:.4%}"
        return Breach(
            guardrail.name,
            f"{guardrail.name}: {test.tested.shown} of the candidate, {expected}; evidence "
            f"10^{test.log_e / LOG_10:.1f}, limit 10^{self.limit / LOG_10:.1f}",
        )

    def _describe(self, guardrail: Guardrail, test: SequentialTest) -> dict[str, Any]:
        shown = {
            "guardrail": guardrail.name,
            "evidence": test.log_e / LOG_10,
            "limit": self.limit / LOG_10,
            "p": math.exp(-max(0.0, test.log_e)),
            "candidate": test.tested.described(),
            "stable": test.reference.described(),
            "shown_ratio": test.shown_ratio(self.limit),
            "breached": guardrail.name in self._breached,
        }
        if guardrail.most is not None:
            shown["max"] = guardrail.most
        if (proof := self._proofs.get(guardrail.name)) is not None:
            shown["proof"] = {
                "ratio": self.guardrails.proofs[guardrail.name],
                "evidence": proof.log_e / LOG_10,
                "limit": self._proof_limit / LOG_10,
            }
        return shown


class Evidence(RequestBlocks, GuardrailTests):
    """The blocks of this process, and their tests. Call `judge` once a second.

    `on_dead_on_arrival` is called once the candidate's first requests have all failed by the
    server's fault.
    """

    def __init__(
        self,
        guardrails: Guardrails,
        alpha: float = 0.01,
        on_dead_on_arrival: Callable[[], None] = lambda: None,
        random: Random | None = None,
    ) -> None:
        GuardrailTests.__init__(self, guardrails, alpha, random)
        RequestBlocks.__init__(self, guardrails, self)
        self._on_dead_on_arrival = on_dead_on_arrival

    def arrived(self) -> None:
        """See `BlockReader`."""
        self._on_dead_on_arrival()

    def judge(self, now_ns: int) -> list[Breach]:
        """Judge the blocks that are decided; returns the guardrails that they breach.

        Each is returned once.
        """
        self.count(now_ns)
        return self.breaches()

    def dump(self) -> dict[str, Any]:
        """See `GuardrailTests`; requests in blocks that are not judged are lost."""
        return {
            **super().dump(),
            "ended": list(self.ended),
            "failures": self.failures,
            "has_arrived": self.has_arrived,
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        stable, candidate, copies = map(int, state["ended"])
        self.ended = [stable, candidate, copies]
        self.failures = int(state["failures"])
        self.has_arrived = bool(state["has_arrived"])
