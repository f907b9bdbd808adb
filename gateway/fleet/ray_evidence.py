"""The evidence of a rollout on Ray: routers count, and the controller adds their counts up."""

import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gateway.rollouts.blocks import FIRST_FAILURES, RequestBlocks
from gateway.rollouts.evidence import GuardrailTests
from gateway.rollouts.guardrails import Guardrails
from gateway.rollouts.observation import Arm
from gateway.rollouts.sequential_test import Counts

KEY_BYTES = 8
"""The bytes of the digest of a key that the controller gets."""
MOST_PARTS = 10_000
"""Parts that a router keeps for a controller that does not answer; then it drops the oldest."""


class EvidencePart(msgspec.Struct, frozen=True):
    """The counts of a block for a guardrail, by its place; parts of a source have numbers."""

    number: int
    guardrail: int
    stable: Counts
    candidate: Counts


class EvidenceNews(msgspec.Struct, frozen=True):
    """The counts of one `source`, a router, for an `evidence` of the controller.

    `parts` are those that the controller has not acknowledged. Of all requests of the candidate
    `ended` have, and the last `failures` of them have failed. Those that failed before
    the first one succeeded had `failed_keys`, digests that are equal at all routers, or `keyless`
    of them none; `has_arrived`: one has succeeded.
    """

    evidence: str
    source: str
    parts: tuple[EvidencePart, ...] = ()
    ended: int = 0
    failures: int = 0
    failed_keys: tuple[str, ...] = ()
    keyless: int = 0
    has_arrived: bool = False


class RouterEvidence:
    """The observed requests of a router; implements `BlockReader`."""

    def __init__(self, evidence: str, guardrails: Guardrails) -> None:
        self.evidence = evidence
        self.blocks = RequestBlocks(guardrails, self)
        self._source = secrets.token_hex(8)
        self._number = 0
        self._parts: deque[EvidencePart] = deque(maxlen=MOST_PARTS)

    def add(self, at: int, stable: Counts, candidate: Counts) -> None:
        """See `BlockReader`."""
        self._number += 1
        self._parts.append(EvidencePart(self._number, at, stable, candidate))

    def arrived(self) -> None:
        """See `BlockReader`: the controller adds the first failures of all routers up."""

    def acknowledge(self, heard: Mapping[str, int]) -> None:
        """Drop the parts that the controller has."""
        last = heard.get(self._source, 0)
        while self._parts and self._parts[0].number <= last:
            self._parts.popleft()

    def news(self) -> EvidenceNews:
        """The counts of now."""
        self.blocks.count(time.perf_counter_ns())
        first = self.blocks.first_failures
        keys = sorted(each[:KEY_BYTES].hex() for each in first if isinstance(each, bytes))
        return EvidenceNews(
            self.evidence,
            self._source,
            tuple(self._parts),
            self.blocks.ended[Arm.CANDIDATE],
            self.blocks.failures,
            tuple(keys),
            len(first) - len(keys),
            self.blocks.has_arrived,
        )


class FleetEvidence(GuardrailTests):
    """The tests of the guardrails for the counts of all routers.

    Blocks of a router come in order; those of several routers as they arrive.
    """

    def __init__(self, guardrails: Guardrails, alpha: float) -> None:
        super().__init__(guardrails, alpha)
        self.failures = 0
        """Failed requests of the candidate since its last complete one."""
        self._last: dict[str, EvidenceNews] = {}

    @property
    def heard(self) -> Mapping[str, int]:
        """The number of the last part of each source."""
        return {source: news.parts[-1].number for source, news in self._last.items() if news.parts}

    @property
    def seen(self) -> int:
        """The ended requests of the candidate."""
        return sum(each.ended for each in self._last.values())

    @property
    def is_dead_on_arrival(self) -> bool:
        """Whether the first requests of the candidate have failed at all routers together."""
        known = self._last.values()
        keys = {key for each in known for key in each.failed_keys}
        failures = len(keys) + sum(each.keyless for each in known)
        return failures >= FIRST_FAILURES and not any(each.has_arrived for each in known)

    def take(self, reports: Iterable[EvidenceNews]) -> None:
        """Add the counts of routers that are new."""
        for news in reports:
            before = self._last.get(news.source, EvidenceNews(news.evidence, news.source))
            last = before.parts[-1].number if before.parts else 0
            new = [each for each in news.parts if each.number > last]
            for each in new:
                self.add(each.guardrail, each.stable, each.candidate)
            ended = news.ended - before.ended
            has_completed = news.failures != before.failures + ended
            self.failures = news.failures if has_completed else self.failures + ended
            kept = (*before.parts, *new)[-1:]
            self._last[news.source] = msgspec.structs.replace(news, parts=kept)

    def dump(self) -> dict[str, Any]:
        """See `GuardrailTests`."""
        return {**super().dump(), "failures": self.failures, "sources": [*self._last.values()]}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self.failures = int(state["failures"])
        sources = msgspec.convert(state["sources"], tuple[EvidenceNews, ...])
        self._last = {each.source: each for each in sources}
