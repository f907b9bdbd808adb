"""The number and the placement of a model's replicas, in the `parameters` of its configuration."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.config import InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.model_folder import Versions

COUNT = re.compile(r"([0-9]{1,4})(?:\.\.([0-9]{1,4}))?")
NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
LABEL = re.compile(rf"(?:(?=.{{1,253}}/){NAME}(?:\.{NAME})*/)?{NAME}")
SELECTOR = re.compile(rf"(?:!?{NAME}|!?in\({NAME}(?:, ?{NAME})*\))?")
"""A label of Ray, and what is wanted of its value."""
MOST_SECS = 86_400
CPU, GPU = "CPU", "GPU"
RESOURCES = "replica_resources"


@dataclass(frozen=True, slots=True)
class EngineSpread:
    """The GPUs over which the files of a model spread its engine, 0 if they name none.

    `by_ray`: they are those of the engine's own Ray workers, on any nodes.
    """

    gpus: int = 0
    by_ray: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRules:
    """The rules for the replicas of a model.

    There are `least` to `most` of them. Each takes `resources` of a node that has every label of
    `labels`, or else `bundles` of such nodes, which the workers of its engine take. A request shall
    wait at most `target_wait_secs`. A need of more replicas lasts for `up_secs` before there are
    more, a need of fewer for `down_secs`. With a `least` of 0 the last one ends after
    `to_zero_secs` without a need, and a request waits for the first one for at most
    `cold_start_secs`. One that is not ready `start_secs` after it got its place is ended.
    `description` is a digest of the files that they have. They do not load the versions `left_out`,
    by the names of models.
    """

    least: int = 1
    most: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    bundles: Sequence[Mapping[str, float]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    target_wait_secs: float = 1.0
    up_secs: float = 10.0
    down_secs: float = 300.0
    to_zero_secs: float = 900.0
    cold_start_secs: float = 600.0
    start_secs: float = 1800.0
    description: str = ""
    left_out: Versions = field(default_factory=dict)

    @classmethod
    def read(cls, config: ModelConfig, spread: EngineSpread | None = None) -> "ReplicaRules":
        """The rules of a config, of files with that spread; INVALID_ARG for a wrong value.

        Without a spread the files are not known: the resources may be others.
        """
        for refusal in problems(config):
            raise InferenceError(Code.INVALID_ARG, refusal)
        found: dict[str, Any] = dict(_usual_places(config, spread or EngineSpread()))
        for key in READERS.keys() & config.parameters.keys():
            found |= READERS[key](config.parameters[key])
        rules = cls(**found)
        if spread is not None and (expected := _other_places(rules, spread)):
            refusal = _refusal(RESOURCES, config.parameters[RESOURCES], config.name, expected)
            raise InferenceError(Code.INVALID_ARG, refusal)
        return rules

    @property
    def places(self) -> str:
        """The resources in words, such as `2 GPU, 1 CPU` or `4 x (1 GPU, 1 CPU)`."""
        if not self.bundles:
            return _amounts(self.resources)
        alike = Counter(map(_amounts, self.bundles))
        return ", ".join(f"{count} x ({amounts})" for amounts, count in alike.items())


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _usual_places(config: ModelConfig, spread: EngineSpread) -> Mapping[str, Any]:
    """A CPU, and the GPUs of the engine, or of instance groups: one without a list has one."""
    if spread.by_ray:
        return {"bundles": ({GPU: 1.0, CPU: 1.0},) * spread.gpus}
    groups = [each for each in config.instance_group if each.kind is InstanceKind.KIND_GPU]
    gpus = spread.gpus or len({gpu for each in groups for gpu in each.gpus or (0,)})
    return {"resources": {CPU: 1.0} | ({GPU: float(gpus)} if gpus else {})}


def _other_places(rules: ReplicaRules, spread: EngineSpread) -> str:
    """The resources that an engine with that spread has to have instead; "" if they fit."""
    if spread.by_ray and len(rules.bundles) != spread.gpus:
        return (
            f"a list of {spread.gpus} bundles with one GPU each, for the Ray workers of its "
            "model.json"
        )
    if rules.bundles and not spread.by_ray:
        return (
            "the resources of one node: bundles are for a model.json with "
            '"distributed_executor_backend": "ray"'
        )
    return ""


def _count(text: str) -> Mapping[str, Any]:
    found = COUNT.fullmatch(text)
    least = int(found[1]) if found else 0
    most = int(found[2] or found[1]) if found else 0
    if not (least <= most and most):
        raise ValueError("a number from 1 to 9999, or a range such as 0..8")
    return {"least": least, "most": most}


def _resources(text: str) -> Mapping[str, Any]:
    expected = (
        'JSON with amounts above 0 such as {"GPU": 1, "CPU": 4}, whole GPUs above 1, or a list of '
        "such bundles with one GPU each"
    )
    found = _json(text, dict[str, float] | list[dict[str, float]], expected)
    bundles = found if isinstance(found, list) else [found]
    if not (bundles and all(map(_are_amounts, bundles))):
        raise ValueError(expected)
    if bundles is not found:
        return {"resources": found, "bundles": ()}
    # Each worker of vLLM's Ray executor has a bundle, and vLLM refuses one with more GPUs.
    if any(each.get(GPU) != 1 for each in bundles):
        raise ValueError(expected)
    return {"resources": {}, "bundles": tuple(bundles)}


def _are_amounts(resources: Mapping[str, float]) -> bool:
    gpus = resources.get(GPU, 1.0)
    is_whole = gpus < 1 or gpus.is_integer()
    return bool(resources) and all(resources) and min(resources.values()) > 0 and is_whole


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
    RESOURCES: _resources,
    "replica_labels": _labels,
    "scale_target_wait_ms": _secs("target_wait_secs", 1000),
    "scale_up_secs": _secs("up_secs"),
    "scale_down_secs": _secs("down_secs"),
    "scale_to_zero_secs": _secs("to_zero_secs"),
    "cold_start_limit_secs": _secs("cold_start_secs"),
    "start_limit_secs": _secs("start_secs"),
}
"""For each key of `parameters`: the fields of its value; ValueError has the expected value."""


OF_CONTROLLER = frozenset({"replicas", "scale_up_secs", "scale_down_secs", "start_limit_secs"})
"""Those that no replica reads: a change of them replaces none."""


def problem(key: str, value: str, model: str) -> str:
    """The objection to the value of one of `READERS`, "" without one."""
    try:
        READERS[key](value)
    except ValueError as error:
        return _refusal(key, value, model, str(error))
    return ""


def _refusal(key: str, value: str, model: str, expected: str) -> str:
    return f"model '{model}': parameter '{key}' is '{value}', expected {expected}"


def problems(config: ModelConfig) -> Iterator[str]:
    """The objections to the parameters of a config."""
    given = [(key, config.parameters[key]) for key in READERS if key in config.parameters]
    yield from filter(None, [problem(key, value, config.name) for key, value in given])
