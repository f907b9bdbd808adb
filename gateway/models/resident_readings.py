"""Readings of models in memory: `GET /v2/memory`, and metrics."""

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.backend import MetricReading
from gateway.models.model import Model
from gateway.models.residence import MODELS, Memory, Resident, Stage
from gateway.models.residents import Residents

RESIDENT_GAUGES = {
    "gateway_model_resident": "1 if the version is in memory, 0 if it is asleep",
    "gateway_model_resident_bytes": "Memory that the version is taken to have, by place",
    "gateway_model_lru_age_seconds": "Seconds since the last use of the version that slept last "
    "for another one; below a minute models thrash",
    "gateway_waking_requests": "Requests that wait for a version that is asleep",
}
RESIDENT_COUNTERS = {
    "gateway_model_wakes_total": "Loads of versions that were asleep, by outcome",
    "gateway_model_wake_seconds_total": "Seconds of those that succeeded",
    "gateway_model_evictions_total": "Versions put to sleep, by reason: room or keep_alive",
}
RESIDENT_METRICS = RESIDENT_GAUGES | RESIDENT_COUNTERS

Sample = tuple[str, Mapping[str, str], float]


def describe(residents: Residents, now: float) -> dict[str, Any]:
    """The budget and the versions as members of JSON; `now` is the loop's time."""
    rows = [_row(*found, now) for found in _versions(residents)]
    return {"budget": dict(residents.residence.budget), "models": rows}


def families(residents: Residents) -> list[MetricReading]:
    """The metrics; none if no version is asleep or has a budget."""
    if not residents.models:
        return []
    found = {
        name: MetricReading(name, text, "gauge" if name in RESIDENT_GAUGES else "counter")
        for name, text in RESIDENT_METRICS.items()
    }
    for name, labels, value in _samples(residents):
        found[name].add_sample(name, labels, value)
    return [each for each in found.values() if each.samples]


def waiting(residents: Residents) -> int:
    """Requests that wait for a version that is not awake."""
    return sum(
        not each.started_ns
        for resident, (model, _) in residents.models.items()
        if resident.stage is not Stage.AWAKE
        for each in model.requests
    )


def _samples(residents: Residents) -> Iterator[Sample]:
    for resident, model in _versions(residents):
        labels = {"model": model.name, "version": model.version}
        yield "gateway_model_resident", labels, int(resident.stage is Stage.AWAKE)
        for place, size in _bytes(resident.memory).items():
            yield "gateway_model_resident_bytes", {**labels, "place": place}, size
    if (age := residents.residence.lru_age_secs) is not None:
        yield "gateway_model_lru_age_seconds", {}, age
    yield "gateway_waking_requests", {}, waiting(residents)
    yield "gateway_model_wakes_total", {"outcome": "success"}, residents.woken
    yield "gateway_model_wakes_total", {"outcome": "failure"}, residents.failed
    yield "gateway_model_wake_seconds_total", {}, residents.wake_secs
    for why, count in sorted(residents.evictions.items()):
        yield "gateway_model_evictions_total", {"why": why}, count


def _versions(residents: Residents) -> list[tuple[Resident, Model]]:
    found = [(resident, model) for resident, (model, _) in residents.models.items()]
    return sorted(found, key=lambda each: (each[1].name, int(each[1].version)))


def _row(resident: Resident, model: Model, now: float) -> Mapping[str, Any]:
    idle_secs = 0.0 if resident.usage.present else round(now - resident.used_at, 1)
    return {
        "name": model.name,
        "version": model.version,
        "state": resident.stage.value,
        "residency": resident.rules.residency.value,
        "memory": _bytes(resident.memory),
        "memory_awake": _bytes(resident.needs),
        "requests": len(resident.usage),
        "idle_secs": idle_secs,
        "keep_alive_secs": resident.rules.keep_alive_secs,
        "load_secs": round(resident.load_secs, 1),
    }


def _bytes(memory: Memory) -> dict[str, int]:
    return {place: size for place, size in memory.items() if place != MODELS}
