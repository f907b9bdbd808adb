"""The models that an ensemble needs, and the models unloaded with it."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import ModelConfig
from gateway.config.scheduling import EnsembleScheduling, EnsembleStep
from gateway.models.ensemble_members import (
    DependencyCycle,
    MemberWaits,
    dependents,
    members,
    orphans,
    resolve,
)
from gateway.models.homes import LocalHome
from gateway.models.registry import KnownModel
from gateway.models.repository import LoadSource, ModelEntry, ModelId
from tests.builders import TEXT


def ensemble(*names: str) -> ModelConfig:
    steps = tuple(EnsembleStep(model_name=name) for name in names)
    return replace(TEXT, ensemble_scheduling=EnsembleScheduling(step=steps))


def known(name: str, config: ModelConfig | None = TEXT, *, implicit: bool = False) -> KnownModel:
    entry = ModelEntry(name=name, home=LocalHome(Path()), folder="", files=Path(), available=(1,))
    source = LoadSource(config=config, entry=entry, snapshot={}) if config is not None else None
    needed = members(config) if config is not None else ()
    return KnownModel(ModelId(name), source=source, implicit=implicit, members=needed)


def test_the_members_of_an_ensemble_are_those_of_its_steps_once_each() -> None:
    assert members(ensemble("b", "a", "b")) == ("b", "a")
    assert members(TEXT) == ()


def test_ensembles_need_the_models_that_their_steps_name() -> None:
    everything = [known("a"), known("both", ensemble("a", "b")), known("gone", None)]
    assert [each.id.name for each in dependents("a", everything)] == ["both"]
    assert dependents("both", everything) == []


def test_orphans_were_loaded_for_the_unloaded_ensemble_only() -> None:
    everything = [
        known("asked_for"),
        known("alone", implicit=True),
        known("shared", implicit=True),
        known("unrelated", implicit=True),
        known("other", ensemble("shared")),
    ]
    left = ensemble("asked_for", "alone", "shared")
    assert [each.id.name for each in orphans(left, everything)] == ["alone"]


@pytest.mark.parametrize(
    ("namespace", "candidates", "meant"),
    [
        ("", [("a", "")], ("a", "")),
        ("", [], None),
        ("one", [("a", "one"), ("a", "two")], ("a", "one")),
        ("three", [("a", "one"), ("a", "two")], None),
        ("three", [("a", "one"), ("b", "two")], ("a", "one")),
    ],
)
def test_a_member_is_the_one_of_the_own_namespace_or_the_only_one(
    namespace: str, candidates: list[tuple[str, str]], meant: tuple[str, str] | None
) -> None:
    found = resolve("a", namespace, [ModelId(*each) for each in candidates])
    assert found == (None if meant is None else ModelId(*meant))


def test_a_wait_for_itself_raises_the_dependency_cycle() -> None:
    a, b, c = (ModelId(name) for name in "abc")
    waits = MemberWaits()
    with waits.entered(a, b), waits.entered(b, c):
        with waits.entered(ModelId("other"), b):
            pass
        with pytest.raises(DependencyCycle) as caught, waits.entered(c, a):
            raise AssertionError("it would wait forever")
    assert caught.value.message == "circular dependency between ensembles: c -> ... -> b -> c"
    assert caught.value.seen_from("a").message == (
        "circular dependency between ensembles: a -> ... -> c -> a"
    )
    with waits.entered(c, a):
        pass


def test_a_model_that_needs_itself_is_a_cycle_of_one() -> None:
    with (
        pytest.raises(DependencyCycle) as caught,
        MemberWaits().entered(ModelId("a"), ModelId("a")),
    ):
        raise AssertionError("it would wait forever")
    assert caught.value.message == "circular dependency between ensembles: a -> ... -> a -> a"
