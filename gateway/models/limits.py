"""Limits of a model in the `parameters` of its configuration."""

from dataclasses import dataclass

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

DEFAULT_MAX_IN_FLIGHT = 1024
DEFAULT_RESTART_TRIES = 3
JOINING_BACKENDS = frozenset({"vllm"})
"""Backends that continue a text once by default: their decoders keep the space at a joint."""
DEFAULT_TURNS = 64
DEFAULT_IDLE_SECS = 600
DEFAULT_CONVERSATIONS = 1024
NS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of load and restarts.

    `max_in_flight`: requests accepted and not yet ended. `restart_tries`: restarts of an instance
    that died, before the model stays unavailable. `continue_tries`: continuations of one text whose
    replica was lost.
    """

    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    restart_tries: int = DEFAULT_RESTART_TRIES
    continue_tries: int = 0

    @classmethod
    def read(cls, config: ModelConfig) -> "Limits":
        """The limits of a config; InferenceError names a value that is no number."""
        return cls(
            max_in_flight=_number(config, "max_in_flight", DEFAULT_MAX_IN_FLIGHT, least=1),
            restart_tries=_number(config, "restart_tries", DEFAULT_RESTART_TRIES, least=0),
            continue_tries=_number(
                config, "continue_tries", int(config.backend in JOINING_BACKENDS), least=0
            ),
        )


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


def _number(config: ModelConfig, key: str, default: int, least: int) -> int:
    text = config.parameters.get(key, str(default))
    if not text.isdecimal() or int(text) < least:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{config.name}': parameter '{key}' is '{text}', expected a number of at "
            f"least {least}",
        )
    return int(text)
