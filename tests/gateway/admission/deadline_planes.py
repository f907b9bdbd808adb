"""Data planes with deadlines, and their counters."""

from dataclasses import replace
from typing import Any

from gateway.dataplane import DataPlane
from gateway.messages import Deadline, InferResponse, Usage
from gateway.models.model import Model
from gateway.settings import AdmissionSettings
from tests.builders import LoadedModels, text_response

SECOND = 10**9


def plane(*models: Model, **settings: Any) -> DataPlane:
    return DataPlane(LoadedModels(*models), admission=AdmissionSettings(**settings))  # type: ignore[arg-type]


def whole(at_ns: int) -> Deadline:
    return Deadline(whole_ns=at_ns, held_whole_ns=at_ns, asked=True)


def first(at_ns: int) -> Deadline:
    return Deadline(first_ns=at_ns, held_first_ns=at_ns, asked=True)


def tokens(count: int, *, final: bool = False) -> InferResponse:
    return replace(text_response("x", final=final), usage=Usage(4, count))


def values(dataplane: DataPlane) -> dict[str, float]:
    """The counters of admission."""
    return {
        sample.name.removeprefix("gateway_"): sample.value
        for family in dataplane.families()
        for sample in family.samples
        if family.name.startswith(("gateway_ad", "gateway_ref", "gateway_slo"))
    }


def samples(dataplane: DataPlane) -> list[tuple[dict[str, str], float]]:
    """The labels and values of `gateway_refused_total`."""
    return [
        (dict(each.labels), each.value)
        for family in dataplane.families()
        for each in family.samples
        if family.name == "gateway_refused_total"
    ]
