"""What `/v1/models` tells of the models that OpenAI's clients may name."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gateway.models.model import Model

OWNER = "sluice"
LENGTH = "max_model_len"
"""The config parameter that tells how many tokens prompt and answer may have together."""


def cards(models: Iterable[Model]) -> Sequence[dict[str, Any]]:
    """One for each name: a model's own, then its further ones, unless a model has that name."""
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
    """What the runtime says counts; where it says nothing, the config may."""
    told = model.config.parameter(LENGTH)
    configured = int(told) if told.isdecimal() else None
    return configured if model.max_model_len is None else model.max_model_len
