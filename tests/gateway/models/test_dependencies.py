"""Which models does an ensemble need, and which go with it?"""

from dataclasses import replace
from pathlib import Path

from gateway.config import ModelConfig
from gateway.models.dependencies import dependents, members, orphans
from gateway.models.identity import ModelId
from gateway.models.lookup import Known
from gateway.models.repository import ModelEntry, Source
from gateway.scheduling import EnsembleScheduling, EnsembleStep
from tests.builders import TEXT


def ensemble(*names: str) -> ModelConfig:
    steps = tuple(EnsembleStep(model_name=name) for name in names)
    return replace(TEXT, ensemble_scheduling=EnsembleScheduling(step=steps))


def known(name: str, config: ModelConfig | None = TEXT, *, implicit: bool = False) -> Known:
    entry = ModelEntry(name=name, path=Path(), available=(1,))
    source = Source(config=config, entry=entry, snapshot={}) if config is not None else None
    return Known(ModelId(name), source=source, implicit=implicit)


def test_the_members_of_an_ensemble_are_those_of_its_steps_once_each() -> None:
    assert members(ensemble("b", "a", "b")) == ("b", "a")
    assert members(TEXT) == ()


def test_only_loaded_models_need_others() -> None:
    everything = [known("a"), known("both", ensemble("a", "b")), known("gone", None)]
    assert [each.id.name for each in dependents("a", everything)] == ["both"]
    assert dependents("both", everything) == []


def test_orphans_were_loaded_for_the_one_that_went_and_nobody_else_needs_them() -> None:
    everything = [
        known("asked_for"),
        known("alone", implicit=True),
        known("shared", implicit=True),
        known("unrelated", implicit=True),
        known("other", ensemble("shared")),
    ]
    left = ensemble("asked_for", "alone", "shared")
    assert [each.id.name for each in orphans(left, everything)] == ["alone"]
