"""The versions of a model at replicas: labels, and the choice between two of them in rollouts."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.errors import InferenceError
from gateway.fleet.instance import FleetInstance
from gateway.fleet.offers import ModelOffer
from gateway.fleet.ray_evidence import EvidenceNews, RouterEvidence
from gateway.fleet.ray_news import RolloutNews, Shares
from gateway.messages import SequenceTag
from gateway.models.labels import CANARY
from gateway.models.model import Model
from gateway.models.registry import STABLE, KnownModel
from gateway.observability.statistics import ModelStatistics
from gateway.rollouts.choice import VersionChoice
from gateway.rollouts.guardrails import read_guardrails
from gateway.rollouts.plan import ALL, read_keys
from gateway.schedulers.scheduler import DirectScheduler, Scheduler

OfReplica = Mapping[int, ModelOffer]
"""The versions of a model that a replica offers."""


class FleetModel(Model):
    """A version that replicas host: their schedulers batch, and keep its sequences."""

    of_fleet = True
    instance: FleetInstance

    @property
    def takes_requests(self) -> bool:
        """See `Model`: a version whose replicas all drain leaves its requests to another one."""
        return self.instance.placement.is_ready

    def _scheduler(self, statistics: ModelStatistics, folder: Path) -> Scheduler:
        return DirectScheduler(statistics)


def labels_of(replicas: Sequence[OfReplica]) -> dict[str, int]:
    """The version of each label at most replicas; of as many the higher one."""
    found = Counter(
        (label, version)
        for offers in replicas
        for version, offer in offers.items()
        for label in offer.names
    )
    ordered = sorted(found, key=lambda each: (found[each], each[1]))
    return dict(ordered)


def shares_of(replicas: Sequence[OfReplica]) -> Shares | None:
    """The mean of the shares at replicas, of which each has a rollout of its own; None without one.

    One that has promoted its candidate gives it every request, one that has taken it back none.
    """
    stables, canaries = Counter[int](), Counter[int]()
    totals, keys = defaultdict[int, float](float), dict[int, tuple[str, ...]]()
    for offers in replicas:
        own = next((n for n, each in offers.items() if STABLE in each.names), None)
        if own is None:
            continue
        stables[own] += 1
        totals[own] += ALL
        for number, each in offers.items():
            if each.weight is not None and number != own:
                canaries[number] += 1
                totals[own] -= each.weight
                totals[number] += each.weight
                keys[number] = each.keys
    if not stables:
        return None
    stable = max(stables, key=lambda each: (stables[each], -each))
    others = (stables.keys() | canaries.keys()) - {stable}
    if not others:
        return None
    other = max(others, key=lambda each: (totals[each], canaries[each], each))
    # Keys keep their versions, also once most replicas have promoted one.
    is_ahead = canaries[stable] > 0 or (not canaries[other] and other < stable)
    pair = (other, stable) if is_ahead else (stable, other)
    shared = totals[pair[0]] + totals[pair[1]]
    return Shares(*pair, ALL * totals[pair[1]] / shared, keys.get(pair[1], ()))


class FleetVersions:
    """The labels of one model, and the choice for its requests without a version."""

    def __init__(self) -> None:
        self._choice: VersionChoice | None = None
        self._chosen: tuple[object, ...] = ()
        """The models of the choice, its keys, and their salt."""
        self._evidence: RouterEvidence | None = None

    def follow(
        self, known: KnownModel, replicas: Sequence[OfReplica], rollout: RolloutNews | None = None
    ) -> None:
        """Take the labels of the ready replicas, if there are any, and their shares.

        Those of the `rollout` of a controller are preferred.
        """
        ruled = None if rollout is None else rollout.shares
        if not replicas and ruled is None:
            return
        labels, shares = labels_of(replicas), ruled or shares_of(replicas)
        models = {int(each.version): each for each in known.models if isinstance(each, FleetModel)}
        if ruled is not None:
            # A replica of the candidate alone calls that stable.
            labels = {label: each for label, each in labels.items() if label != STABLE}
            labels |= {STABLE: ruled.stable} if ruled.stable in models else {}
        if shares is not None and {shares.stable, shares.candidate} <= models.keys():
            is_open = rollout is None or ruled is None or rollout.is_open
            labels |= {STABLE: shares.stable, **({CANARY: shares.candidate} if is_open else {})}
            self._choose(models[shares.stable], models[shares.candidate], shares)
        else:
            self._leave(models.get(labels.get(STABLE, 0)))
        known.labels = labels
        self._observe(rollout)

    def news(self) -> EvidenceNews | None:
        """The counts for the controller, None without a rollout there."""
        return None if self._evidence is None else self._evidence.news()

    def acknowledge(self, rollout: RolloutNews) -> None:
        """Drop the counts that the controller has."""
        if self._evidence is not None and self._evidence.evidence == rollout.evidence:
            self._evidence.acknowledge(rollout.heard)

    def describe(self) -> dict[str, Any] | None:
        """The shares as members of JSON; None without a rollout."""
        found = self._choice
        if found is None:
            return None
        return {
            "model": found.stable.name,
            "stable": int(found.stable.version),
            "candidate": int(found.candidate.version),
            "weight": round(found.weight, 2),
        }

    def _choose(self, stable: FleetModel, candidate: FleetModel, shares: Shares) -> None:
        found, sources = self._choice, read_keys(shares.keys)
        # All routers have the same salt.
        salt = (shares.salt or f"{stable.name}/{candidate.version}/").encode()
        wanted = stable, candidate, sources, salt
        if found is None or wanted != self._chosen:
            self._leave()
            self._chosen = wanted
            found = self._choice = VersionChoice(stable, candidate, _Pinned(), sources, salt)
            for each in (stable, candidate):
                each.chooser = found
                each.instance.is_chosen = True
        found.weight = shares.weight

    def _observe(self, rollout: RolloutNews | None) -> None:
        """Count requests for the evidence of the controller, while it has some."""
        wanted = "" if rollout is None else rollout.evidence
        if self._evidence is not None and self._evidence.evidence != wanted:
            self._evidence = None
        if rollout is not None and wanted and self._evidence is None:
            # A controller of a later release may have guardrails that this router cannot count.
            with suppress(InferenceError):
                guardrails = read_guardrails(rollout.guardrails, "guardrails")
                self._evidence = RouterEvidence(wanted, guardrails)
        if self._choice is not None:
            self._choice.observe(None if self._evidence is None else self._evidence.blocks)

    def _leave(self, successor: FleetModel | None = None) -> None:
        """Choose no more; the successor gets the requests of open sequences of both versions."""
        found, self._choice = self._choice, None
        for each in () if found is None else (found.stable, found.candidate):
            each.chooser = None
            if successor is not None and isinstance(each, FleetModel):
                own = each.instance.placement
                successor.instance.placement.sequences.adopt(own.sequences, moves=own.converses)


class _Pinned:
    """Implements `Turns`: the sequences and conversations that a router knows at replicas."""

    def has(self, model: Model, tag: SequenceTag) -> bool:
        return isinstance(model, FleetModel) and model.instance.placement.has(tag)
