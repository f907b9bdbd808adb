"""What does a model's configuration say of load and of restarts?"""

from dataclasses import dataclass

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

DEFAULT_MAX_IN_FLIGHT = 1024
DEFAULT_RESTART_TRIES = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """What a model's config says of load and of restarts, in its `parameters`.

    `max_in_flight`: requests accepted and not yet ended. `restart_tries`: how often an instance
    that died is loaded again before the model stays unavailable.
    """

    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    restart_tries: int = DEFAULT_RESTART_TRIES

    @classmethod
    def read(cls, config: ModelConfig) -> "Limits":
        """The limits of a config; InferenceError names a value that is no number."""
        return cls(
            max_in_flight=_number(config, "max_in_flight", DEFAULT_MAX_IN_FLIGHT, least=1),
            restart_tries=_number(config, "restart_tries", DEFAULT_RESTART_TRIES, least=0),
        )


def _number(config: ModelConfig, key: str, default: int, least: int) -> int:
    text = config.parameters.get(key, str(default))
    if not text.isdecimal() or int(text) < least:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{config.name}': parameter '{key}' is '{text}', expected a number of at "
            f"least {least}",
        )
    return int(text)
