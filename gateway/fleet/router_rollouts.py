"""Rollouts of models of replicas at a router: shares, counts for the controller, and changes."""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_evidence import EvidenceNews
from gateway.fleet.ray_news import ModelNews, RolloutAnswer, RolloutNews, RolloutRequest
from gateway.fleet.versions import FleetVersions, OfReplica
from gateway.json_lines import cut
from gateway.models.registry import KnownModel, ModelRegistry
from gateway.models.repository import ModelId
from gateway.rollouts.changes import RolloutAction
from gateway.rollouts.rollout import Transition

ANSWER_SECS = 20.0
"""A change that the controller does not answer for this time is given up."""
MOST_CHANGES = 32
"""Changes of a router that wait for the controller; further ones are refused."""


class RouterRollouts:
    """The labels and rollouts of all models of a router.

    Implements `RolloutController` for those of the controller on Ray: it passes changes on.
    """

    def __init__(self) -> None:
        self._versions: defaultdict[str, FleetVersions] = defaultdict(FleetVersions)
        self._models: Mapping[str, ModelNews] = {}
        self._changes: dict[str, RolloutRequest] = {}
        self._answers: dict[str, asyncio.Future[RolloutAnswer]] = {}

    def follow(
        self,
        named: Iterable[str],
        registry: ModelRegistry,
        offers: Callable[[KnownModel], Sequence[OfReplica]],
    ) -> None:
        """Take the labels and shares of ready replicas, or those of the controller.

        `named` are the models whose replicas have labels.
        """
        ruled = (name for name, each in self._models.items() if each.rollout.shares)
        for name in {*named, *ruled, *self._versions}:
            known = registry.get(ModelId(name))
            if known is not None and known.of_fleet:
                rollout = self._models[name].rollout if name in self._models else None
                self._versions[name].follow(known, offers(known), rollout)

    def take(self, models: Mapping[str, ModelNews]) -> bool:
        """Take the news of the controller; whether they differ in more than counts."""
        before, self._models = self._models, models
        for each in models.values():
            for number in each.rollout.answers.keys() & self._answers.keys():
                if not (answer := self._answers[number]).done():
                    answer.set_result(each.rollout.answers[number])
        for name in self._versions.keys() & models.keys():
            self._versions[name].acknowledge(models[name].rollout)
        return before.keys() != models.keys() or any(
            each != before[name] and _shown(each) != _shown(before[name])
            for name, each in models.items()
        )

    def evidence(self) -> Mapping[str, EvidenceNews]:
        """The counts for the controller."""
        found = {name: each.news() for name, each in self._versions.items()}
        return {name: each for name, each in found.items() if each is not None}

    @property
    def changes(self) -> tuple[RolloutRequest, ...]:
        """The requests without an answer."""
        return tuple(self._changes.values())

    def describe(self) -> list[dict[str, Any]]:
        """The shares of each model with a rollout as members of JSON."""
        return [shares for each in self._versions.values() if (shares := each.describe())]

    # RolloutController.

    def states(self) -> Mapping[str, Mapping[str, Any]]:
        """See `RolloutController`."""
        found = {name: each.rollout.state for name, each in self._models.items()}
        return {name: state for name, state in found.items() if "candidate" in state}

    def state(self, name: str) -> Mapping[str, Any] | None:
        """See `RolloutController`."""
        found = self._models.get(name)
        return None if found is None else found.rollout.state or {"model": name, "stable": None}

    def history(self, name: str) -> Sequence[Transition]:
        """See `RolloutController`."""
        return self._models[name].rollout.history

    async def change(
        self, name: str, action: RolloutAction, members: Mapping[str, Any], by: str
    ) -> None:
        """See `RolloutController`; the state is that after the change on return."""
        if len(self._changes) >= MOST_CHANGES:
            text = f"{MOST_CHANGES} changes wait for the controller of the fleet; try again later"
            raise InferenceError(Code.UNAVAILABLE, text)
        number, sent = secrets.token_hex(8), dict(members)
        if isinstance(reason := sent.get("reason"), str):
            sent["reason"] = cut(reason)
        self._changes[number] = RolloutRequest(number, name, action, sent, by)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ANSWER_SECS):
                found = await answer
        except TimeoutError:
            text = f"the controller of the fleet has not answered for {ANSWER_SECS:g} s"
            raise InferenceError(Code.UNAVAILABLE, text) from None
        finally:
            del self._changes[number], self._answers[number]
        if found.error:
            raise InferenceError(found.code, found.error)


def _shown(found: ModelNews) -> ModelNews:
    """A model without what no choice depends on."""
    rollout = RolloutNews(
        shares=found.rollout.shares,
        is_open=found.rollout.is_open,
        evidence=found.rollout.evidence,
    )
    return msgspec.structs.replace(found, rollout=rollout)
