"""Metrics of rollouts."""

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.backend import MetricReading
from gateway.models.labels import CANARY
from gateway.models.registry import STABLE
from gateway.rollouts.model_rollouts import ModelRollouts
from gateway.rollouts.plan import ALL
from gateway.rollouts.rollout import RolloutState
from gateway.rollouts.rollouts import Rollouts

ROLLOUT_GAUGES = {
    "gateway_rollout_weight": "Percentage of the requests that the version gets, by its label",
    "gateway_rollout_state": "1 for the state of the latest rollout, 0 for the others",
    "gateway_rollout_evidence": "Evidence against the new version by guardrail (log10)",
    "gateway_rollout_evidence_limit": "Evidence at which the guardrail is broken (log10)",
}
ROLLOUT_COUNTERS = {
    "gateway_rollout_events_total": "Requests of a version for which a guardrail's predicate is "
    "true, since the evidence began",
    "gateway_rollout_decisions_total": "Promotions, pauses and ends of rollouts, by decision",
}
ROLLOUT_METRICS = ROLLOUT_GAUGES | ROLLOUT_COUNTERS

Sample = tuple[str, Mapping[str, str], float]


def rollout_families(rollouts: Rollouts) -> list[MetricReading]:
    """The families; none without rollouts."""
    found = {
        name: MetricReading(name, text, "gauge" if name in ROLLOUT_GAUGES else "counter")
        for name, text in ROLLOUT_METRICS.items()
    }
    shadows: dict[str, list[MetricReading]] = {}
    for of_model in rollouts.models():
        for name, labels, value in _samples(of_model):
            found[name].add_sample(name, labels, value)
        for family in () if of_model.choice is None else of_model.choice.families():
            shadows.setdefault(family.name, []).append(family)
    for (model, decision), count in sorted(rollouts.decisions.items()):
        name = "gateway_rollout_decisions_total"
        found[name].add_sample(name, {"model": model, "decision": decision}, count)
    for first, *others in shadows.values():
        first.samples.extend(sample for each in others for sample in each.samples)
        found[first.name] = first
    return [each for each in found.values() if each.samples]


def _samples(of_model: ModelRollouts) -> Iterator[Sample]:
    state = of_model.describe()
    name = {"model": state["model"]}
    for each in RolloutState:
        yield "gateway_rollout_state", {**name, "state": each.value}, each is state["state"]
    if of_model.open is not None:
        weights = {
            "stable": (STABLE, ALL - state["weight"]),
            "candidate": (CANARY, state["weight"]),
        }
        for arm, (label, weight) in weights.items():
            labels = {**name, "version": str(state[arm]), "label": label}
            yield "gateway_rollout_weight", labels, weight
    for guardrail in state["guardrails"]:
        yield from _of_guardrail(state, guardrail)


def _of_guardrail(state: Mapping[str, Any], guardrail: Mapping[str, Any]) -> Iterator[Sample]:
    labels = {"model": state["model"], "guardrail": guardrail["guardrail"]}
    yield "gateway_rollout_evidence", labels, guardrail["evidence"]
    yield "gateway_rollout_evidence_limit", labels, guardrail["limit"]
    for arm in ("stable", "candidate"):
        of_version = {**labels, "version": str(state[arm])}
        yield "gateway_rollout_events_total", of_version, guardrail[arm]["events"]
