"""The number and the placement of a model's replicas, in the `parameters` of its configuration."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.config import InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError

COUNT = re.compile(r"([0-9]{1,4})(?:\.\.([0-9]{1,4}))?")
NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
LABEL = re.compile(rf"(?:(?=.{{1,253}}/){NAME}(?:\.{NAME})*/)?{NAME}")
SELECTOR = re.compile(rf"(?:!?{NAME}|!?in\({NAME}(?:, ?{NAME})*\))?")
"""A label of Ray, and what is wanted of its value."""
MOST_SECS = 86_400
CPU, GPU = "CPU", "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRules:
    """The rules for the replicas of a model.

    There are `least` to `most` of them. Each takes `resources` of a node that has every label of
    `labels`. A request shall wait at most `target_wait_secs`. A need of more replicas lasts for
    `up_secs` before there are more, a need of fewer for `down_secs`.
    """

    least: int = 1
    most: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    target_wait_secs: float = 1.0
    up_secs: float = 10.0
    down_secs: float = 300.0

    @classmethod
    def read(cls, config: ModelConfig) -> "ReplicaRules":
        """The rules of a config; INVALID_ARG for a wrong value."""
        for refusal in problems(config):
            raise InferenceError(Code.INVALID_ARG, refusal)
        found: dict[str, Any] = {"resources": _usual_resources(config)}
        for key in READERS.keys() & config.parameters.keys():
            found |= READERS[key](config.parameters[key])
        return cls(**found)


def _usual_resources(config: ModelConfig) -> Mapping[str, float]:
    """A CPU, and the GPUs of the instance groups: a group without a list has one."""
    groups = [each for each in config.instance_group if each.kind is InstanceKind.KIND_GPU]
    gpus = {gpu for each in groups for gpu in each.gpus or (0,)}
    return {CPU: 1.0} | ({GPU: float(len(gpus))} if gpus else {})


def _count(text: str) -> Mapping[str, Any]:
    found = COUNT.fullmatch(text)
    least = int(found[1]) if found else 0
    most = int(found[2] or found[1]) if found else 0
    if not 1 <= least <= most:
        raise ValueError("a number from 1 to 9999, or a range such as 1..8")
    return {"least": least, "most": most}


def _resources(text: str) -> Mapping[str, Any]:
    expected = 'JSON with amounts above 0 such as {"GPU": 1, "CPU": 4}, whole GPUs above 1'
    found = _json(text, dict[str, float], expected)
    whole = found.get(GPU, 1.0) < 1 or found.get(GPU, 1.0).is_integer()
    if not (found and all(found) and min(found.values()) > 0 and whole):
        raise ValueError(expected)
    return {"resources": found}


def _labels(text: str) -> Mapping[str, Any]:
    expected = 'JSON with labels of Ray such as {"ray.io/accelerator-type": "H100"}'
    found = _json(text, dict[str, str], expected)
    if not (all(map(LABEL.fullmatch, found)) and all(map(SELECTOR.fullmatch, found.values()))):
        raise ValueError(expected)
    return {"labels": found}


def _json(text: str, kind: Any, expected: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError:
        raise ValueError(expected) from None


def _secs(name: str, per_sec: int = 1) -> Callable[[str], Mapping[str, Any]]:
    def read(text: str) -> Mapping[str, Any]:
        if not (text.isdecimal() and 1 <= int(text) <= MOST_SECS * per_sec):
            raise ValueError(f"a whole number from 1 to {MOST_SECS * per_sec}")
        return {name: int(text) / per_sec}

    return read


READERS: Mapping[str, Callable[[str], Mapping[str, Any]]] = {
    "replicas": _count,
    "replica_resources": _resources,
    "replica_labels": _labels,
    "scale_target_wait_ms": _secs("target_wait_secs", 1000),
    "scale_up_secs": _secs("up_secs"),
    "scale_down_secs": _secs("down_secs"),
}
"""For each key of `parameters`: the fields of its value; ValueError has the expected value."""


def problem(key: str, value: str, model: str) -> str:
    """The objection to the value of one of `READERS`, "" without one."""
    try:
        READERS[key](value)
    except ValueError as error:
        return f"model '{model}': parameter '{key}' is '{value}', expected {error}"
    return ""


def problems(config: ModelConfig) -> Iterator[str]:
    """The objections to the parameters of a config."""
    given = [(key, config.parameters[key]) for key in READERS if key in config.parameters]
    yield from filter(None, [problem(key, value, config.name) for key, value in given])
