"""Models behind OpenAI's endpoints: look-up by name, and the list at `/v1/models`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gateway.config import ModelConfig
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.openai.encoders import encoder_of
from gateway.frontends.http.openai.errors import refusal
from gateway.models.model import Model
from gateway.openai_contract import (
    ENDPOINT,
    REQUEST,
    RESPONSE,
    Endpoint,
    declares_endpoint,
    serves_openai,
)

OWNER = "sluice"
LENGTH = "max_model_len"
"""The config parameter with the maximum number of tokens of prompt and answer together."""


class ServedModels:
    """The models that serve OpenAI's endpoints, by their own and further names."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    def __iter__(self) -> Iterator[Model]:
        """Each ready model that serves any endpoint, in its highest version, by name."""
        ready = {model.name: model for model in self._dataplane.models() if model.ready}
        return (model for model in ready.values() if any(serves(model.config, e) for e in Endpoint))

    def find(self, name: str, endpoint: Endpoint) -> Model:
        """The model with that name; for "" the only one that serves the endpoint.

        NOT_FOUND if there is none, UNAVAILABLE while it is being loaded, INVALID_ARG if it does
        not serve the endpoint.
        """
        model = self._named(name) if name else self._only(endpoint)
        if not serves(model.config, endpoint):
            raise _unfit(name, model.config, endpoint)
        return model

    def why_not(self, name: str) -> InferenceError:
        """The error for a name that is unknown, serves no endpoint, or is not ready."""
        try:
            model = self._named(name)
        except InferenceError as error:
            return error
        if not any(serves(model.config, endpoint) for endpoint in Endpoint):
            return _unknown(name)
        return InferenceError(
            Code.UNAVAILABLE, f"model '{model.name}' is unavailable: {model.trouble}"
        )

    def _named(self, name: str) -> Model:
        try:
            return self._dataplane.model(name)
        except InferenceError as error:
            if error.code is Code.INVALID_ARG:
                raise
            if (found := self._further_named(name)) is not None:
                return found
            if error.code is not Code.NOT_FOUND:
                raise
        raise _unknown(name)

    def _further_named(self, name: str) -> Model | None:
        for model in self._dataplane.models():
            if name in model.further_names:
                return self._dataplane.model(model.name)
        return None

    def _only(self, endpoint: Endpoint) -> Model:
        found = [model for model in self if serves(model.config, endpoint)]
        if not found:
            # A model that restarts is named all the same; its request gets the reason.
            down = {model.name: model for model in self._dataplane.models()}
            found = [model for model in down.values() if serves(model.config, endpoint)]
        if len(found) != 1:
            names = ", ".join(model.name for model in found) or "none"
            raise refusal(
                Code.INVALID_ARG,
                f"`model` is missing, expected the name of a model that serves {endpoint}: {names}",
                "model",
            )
        return found[0]


def serves(config: ModelConfig, endpoint: Endpoint) -> bool:
    """Whether a model with this config serves an endpoint."""
    if serves_openai(config):
        return endpoint is Endpoint.CHAT or declares_endpoint(config)
    return endpoint is Endpoint.EMBEDDINGS and encoder_of(config) is not None


def _unknown(name: str) -> InferenceError:
    return refusal(Code.NOT_FOUND, f"The model `{name}` does not exist.", "model")


def _unfit(name: str, config: ModelConfig, endpoint: Endpoint) -> InferenceError:
    lacks = f"it lacks the input '{REQUEST}' or the output '{RESPONSE}'"
    if serves_openai(config):
        lacks = f"it lacks the input '{ENDPOINT}'"
    elif endpoint is Endpoint.EMBEDDINGS:
        lacks += (
            ", and does not have exactly one required input, BYTES with one element, and exactly "
            "one output that is a vector of FP32 of a fixed size"
        )
    return refusal(
        Code.INVALID_ARG, f"The model `{name}` does not serve {endpoint}: {lacks}", "model"
    )


def cards(models: Iterable[Model]) -> Sequence[dict[str, Any]]:
    """A card for each name: the model's own, then further ones that no model has as its own."""
    listed = list(models)
    own = {model.name for model in listed}
    return [card for model in listed for card in _cards_of(model, own)]


def _cards_of(model: Model, taken: set[str]) -> Iterator[dict[str, Any]]:
    yield _card(model, model.name, None)
    for name in model.further_names:
        if name not in taken:
            yield _card(model, name, model.name)


def _card(model: Model, name: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(model.loaded_at),
        "owned_by": OWNER,
        "root": model.name,
        "parent": parent,
        "max_model_len": _length(model),
    }


def _length(model: Model) -> int | None:
    """The length by the runtime, or else by the config."""
    told = model.config.parameter(LENGTH)
    configured = int(told) if told.isdecimal() else None
    return configured if model.max_model_len is None else model.max_model_len
