"""Backends of this repository are found without entry points, and before them."""

import importlib.metadata
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from backends.identity import IdentityBackend
from backends.square import SquareBackend
from gateway.backend_loader import GROUP, OWN_BACKENDS, BackendLoader
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from tests.serving import ROOT


def test_no_entry_point_is_read_for_an_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(group: str) -> tuple[Any, ...]:
        raise AssertionError("the entry points were read")

    monkeypatch.setattr(importlib.metadata, "entry_points", read)
    loader = BackendLoader()
    found = loader.of(ModelConfig(name="m", backend="identity"))
    assert isinstance(found, IdentityBackend)
    named = ModelConfig(name="m", backend="identity", runtime="libtriton_identity.so")
    assert loader.of(named) is found
    assert loader.find("identity").value == OWN_BACKENDS["identity"]
    assert loader.computes_on_gpus("identity") is found.computes_on_gpus


def test_an_entry_point_with_the_name_of_an_own_backend_has_no_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    square = OWN_BACKENDS["square"]
    points = [EntryPoint(name, square, GROUP) for name in ("identity", "plugin")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    loader = BackendLoader()
    assert isinstance(loader.get("identity"), IdentityBackend)
    assert isinstance(loader.get("plugin"), SquareBackend)
    assert loader.names == sorted([*OWN_BACKENDS, "plugin"])
    with pytest.raises(InferenceError, match=r"'nowhere'; installed backends: .*, plugin, "):
        loader.get("nowhere")


def test_every_backend_of_the_repository_is_in_the_table() -> None:
    folder = ROOT / "backends"
    files = {*folder.glob("*.py"), *folder.glob("*/backend.py")} - {folder / "__init__.py"}
    modules = {
        ".".join(file.relative_to(folder.parent).with_suffix("").parts): file for file in files
    }
    table = {value.partition(":")[0]: name for name, value in OWN_BACKENDS.items()}
    assert table == {module: module.split(".")[1] for module in modules}
    for value in OWN_BACKENDS.values():
        module, _, created = value.partition(":")
        assert f"\nclass {created}(" in modules[module].read_text()
