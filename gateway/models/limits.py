"""Limits of a model in the `parameters` of its configuration."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.memory_settings import ModelMemory

DEFAULT_MAX_IN_FLIGHT = 1024
DEFAULT_RESTART_TRIES = 3
JOINING_BACKENDS = frozenset({"vllm"})
"""Backends that continue a text once by default: their decoders keep the space at a joint."""
DEFAULT_TURNS = 64
DEFAULT_IDLE_SECS = 600
DEFAULT_CONVERSATIONS = 1024
NS_PER_SECOND = 1_000_000_000
MOST_WEIGHT = 1_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of load and restarts.

    `max_in_flight`: requests accepted and not yet ended. `restart_tries`: restarts of an instance
    that died, before the model stays unavailable. `continue_tries`: continuations of one text whose
    replica was lost. `max_wait_ms`: the longest wait for a first response, 0 for any.
    """

    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    restart_tries: int = DEFAULT_RESTART_TRIES
    continue_tries: int = 0
    max_wait_ms: int = 0

    @classmethod
    def read(cls, config: ModelConfig) -> "Limits":
        """The limits of a config; InferenceError names a value that is no number."""
        return cls(
            max_in_flight=_number(config, "max_in_flight", DEFAULT_MAX_IN_FLIGHT, least=1),
            restart_tries=_number(config, "restart_tries", DEFAULT_RESTART_TRIES, least=0),
            continue_tries=_number(
                config, "continue_tries", int(config.backend in JOINING_BACKENDS), least=0
            ),
            max_wait_ms=_number(config, "max_wait_ms", 0, least=0),
        )

    @property
    def max_wait_ns(self) -> int:
        """`max_wait_ms` in nanoseconds."""
        return self.max_wait_ms * (NS_PER_SECOND // 1000)


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """Limits of conversations.

    `turns` and `tokens` of one conversation (0 tokens: any number), `idle_secs` until it is
    dropped, and the `count` of conversations kept; 0 gives the model correlation ids instead.
    `copies`: whether another replica of a fleet keeps a copy of each.
    """

    turns: int = DEFAULT_TURNS
    tokens: int = 0
    idle_secs: int = DEFAULT_IDLE_SECS
    count: int = DEFAULT_CONVERSATIONS
    copies: bool = True

    @classmethod
    def read(cls, config: ModelConfig) -> "ConversationLimits":
        """The limits of a config; InferenceError names a value that is no number."""
        return cls(
            turns=_number(config, "conversation_max_turns", DEFAULT_TURNS, least=1),
            tokens=_number(config, "conversation_max_tokens", 0, least=0),
            idle_secs=_number(config, "conversation_idle_secs", DEFAULT_IDLE_SECS, least=1),
            count=_number(config, "conversation_max", DEFAULT_CONVERSATIONS, least=0),
            copies=_number(config, "conversation_copies", 1, least=0) > 0,
        )

    @property
    def idle_ns(self) -> int:
        """`idle_secs` in nanoseconds."""
        return self.idle_secs * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The service of a token of a prompt and of an answer, by which tenants share a model."""

    prompt: float
    output: float

    @classmethod
    def read(cls, config: ModelConfig) -> "TokenWeights":
        """The weights of a config; InferenceError names a value that is no number."""
        return cls(
            prompt=_weight(config, "fair_prompt_weight", 1.0),
            output=_weight(config, "fair_output_weight", 2.0),
        )


class Residency(StrEnum):
    """The time for which a model is in memory.

    `always`: from its load on. `on_demand`: from a request on, until others need the memory or
    `keep_alive_secs` are over. `pinned`: from its first request on.
    """

    ALWAYS = "always"
    ON_DEMAND = "on_demand"
    PINNED = "pinned"


class SleepLevel(StrEnum):
    """The part of a model that stays while it sleeps: nothing, or what its backend keeps."""

    UNLOAD = "unload"
    LEVEL_1 = "level_1"
    LEVEL_2 = "level_2"


MIB = 1 << 20
MOST_SECS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidenceRules:
    """The rules for a model in memory.

    It sleeps `keep_alive_secs` after its last request, -1 for never. It takes `memory` bytes at
    each place of its instances, None if that is not known. A request waits for it for at most
    `wake_secs`.
    """

    residency: Residency = Residency.ALWAYS
    keep_alive_secs: int = 300
    memory: int | None = None
    sleep: SleepLevel = SleepLevel.UNLOAD
    wake_secs: int = 300

    @classmethod
    def read(cls, config: ModelConfig, *, on_demand: bool = False) -> "ResidenceRules":
        """The rules of a config; INVALID_ARG for a wrong value."""
        found: dict[str, Any] = {"residency": Residency.ON_DEMAND} if on_demand else {}
        for key in RESIDENCE_READERS.keys() & config.parameters.keys():
            text = config.parameters[key]
            if refusal := residence_problem(key, text, config.name):
                raise InferenceError(Code.INVALID_ARG, refusal)
            found |= RESIDENCE_READERS[key](text)
        return cls(**found)


def _one_of(name: str, kind: type[StrEnum]) -> Callable[[str], Mapping[str, Any]]:
    def read(text: str) -> Mapping[str, Any]:
        if text not in list(kind):
            raise ValueError(" or ".join(kind))
        return {name: kind(text)}

    return read


def _whole(name: str, least: int, most: int, unit: int = 1) -> Callable[[str], Mapping[str, Any]]:
    def read(text: str) -> Mapping[str, Any]:
        if not re.fullmatch(r"-?[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return {name: int(text) * unit}

    return read


RESIDENCE_READERS: Mapping[str, Callable[[str], Mapping[str, Any]]] = {
    "residency": _one_of("residency", Residency),
    "keep_alive_secs": _whole("keep_alive_secs", -1, MOST_SECS),
    "memory_mb": _whole("memory", 1, 1 << 30, MIB),
    "sleep": _one_of("sleep", SleepLevel),
    "wake_secs": _whole("wake_secs", 1, MOST_SECS),
}
"""For each key of `parameters`: the fields of its value; ValueError has the expected value."""


def residence_problem(key: str, value: str, model: str) -> str:
    """The objection to the value of one of `RESIDENCE_READERS`, "" without one."""
    try:
        RESIDENCE_READERS[key](value)
    except ValueError as error:
        return f"model '{model}': parameter '{key}' is '{value}', expected {error}"
    return ""


def _number(config: ModelConfig, key: str, default: int, least: int) -> int:
    text = config.parameters.get(key, str(default))
    if not text.isdecimal() or int(text) < least:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{config.name}': parameter '{key}' is '{text}', expected a number of at "
            f"least {least}",
        )
    return int(text)


def _weight(config: ModelConfig, key: str, default: float) -> float:
    text = config.parameters.get(key, str(default))
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if 0 <= found <= MOST_WEIGHT:
        return found
    raise InferenceError(
        Code.INVALID_ARG,
        f"model '{config.name}': parameter '{key}' is '{text}', expected a number from 0 to "
        f"{MOST_WEIGHT}",
    )


def shares_memory(config: ModelConfig, budget: ModelMemory) -> bool:
    """Whether a version may sleep, or takes memory of a budget; ensembles take none."""
    has_budget = budget != ModelMemory() or "residency" in config.parameters
    return has_budget and config.ensemble_scheduling is None


def drops_weights(config: ModelConfig) -> bool:
    """Whether its instances load their weights again at a wake without being loaded anew."""
    return config.parameters.get("sleep") == SleepLevel.LEVEL_2


def is_cached(config: ModelConfig) -> bool:
    """Whether the responses of a model are cached on a server with a response cache."""
    return config.response_cache is not None and config.response_cache.enable
