"""Identities of loads: shared by equal files, or private to one load."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.cache.cache import Insertion, Lookup, ResponseCache
from gateway.config import ModelConfig
from gateway.memory_settings import ModelMemory
from gateway.messages import InferResponse
from gateway.models import load_identity as loading_module
from gateway.models.closings import Closings
from gateway.models.kept_facts import FactsFolder
from gateway.models.load_identity import private_load, shared_load
from gateway.models.loading import ModelLoader, SharedParts
from gateway.models.model import Model
from gateway.models.registry import ModelRegistry
from gateway.models.repository import ModelId, ModelRepository
from gateway.models.residents import Residents
from gateway.observability.statistics import CacheReading
from gateway.settings import ModelSettings
from gateway.threads import load_threads
from tests.builders import soon
from tests.registries import Backends, ScriptedBackend, no_infer, write

TIME_NS = 1_700_000_000_000_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model with one file, made at a certain time."""
    write(tmp_path, "a", 1, backend="identity")
    file = tmp_path / "a" / "1" / "model.bin"
    file.write_bytes(b"weights")
    for path in (file, tmp_path / "a" / "config.pbtxt"):
        os.utime(path, ns=(TIME_NS, TIME_NS))
    return tmp_path / "a"


def identity(model: Path, folder: Path | None = None, config: ModelConfig | None = None) -> bytes:
    source = ModelRepository([model.parent]).source(ModelId("a"))
    return shared_load(source, config or source.config, 1, folder or model / "1")


def test_loads_of_the_same_files_are_one_wherever_they_are(model: Path, tmp_path: Path) -> None:
    before = identity(model)
    assert identity(model) == before
    moved = tmp_path / "elsewhere" / "a"
    moved.parent.mkdir()
    model.rename(moved)
    assert identity(moved) == before


def test_a_load_of_other_files_is_another(model: Path) -> None:
    found = {identity(model)}
    os.utime(model / "1" / "model.bin", ns=(TIME_NS, TIME_NS + 1))
    found.add(identity(model))
    (model / "1" / "model.bin").write_bytes(b"more weights")
    os.utime(model / "1" / "model.bin", ns=(TIME_NS, TIME_NS))
    found.add(identity(model))
    (model / "1" / "another").touch()
    found.add(identity(model))
    assert len(found) == 4


def test_a_load_with_another_config_is_another(model: Path) -> None:
    assert identity(model, config=ModelConfig(name="a", max_batch_size=3)) != identity(model)


def test_a_load_of_another_version_or_by_another_policy_leaves_it_as_it_is(model: Path) -> None:
    before = identity(model)
    (model / "2").mkdir()
    (model / "2" / "model.bin").write_bytes(b"other weights")
    assert identity(model) == before
    write(model.parent, "a", more="version_policy { all {} }", backend="identity")
    assert identity(model) == before
    (model / "labels.txt").touch()
    assert identity(model) != before


def test_files_of_the_store_count_as_the_models_own(model: Path, tmp_path: Path) -> None:
    stored = tmp_path / "store" / "weights"
    stored.mkdir(parents=True)
    found = {identity(model), identity(model, folder=stored)}
    (stored / "model.onnx").touch()
    found.add(identity(model, folder=stored))
    assert len(found) == 3


def test_a_load_by_another_release_is_another(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(model)
    monkeypatch.setattr(loading_module, "__version__", "0.0.0.other")
    assert identity(model) != before


def test_within_a_process_no_load_is_like_another(model: Path) -> None:
    source = ModelRepository([model.parent]).source(ModelId("a"))
    loads = [private_load(source, source.config, 1, model / "1") for _ in range(2)]
    assert loads[0] != loads[1]


class SharedCache(ResponseCache):
    """A cache that other processes use; it finds nothing."""

    shared = True

    def look_up(self, key: bytes) -> Lookup:
        return Lookup()

    def insert(
        self, key: bytes, response: InferResponse, done: Callable[[Insertion], None]
    ) -> None:
        """Keep nothing."""

    def reading(self) -> CacheReading:
        return CacheReading()


@pytest.mark.parametrize("shared", [True, False])
async def test_files_that_change_between_a_poll_and_the_load_are_those_of_the_load(
    model: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    write(model.parent, "a", 1, more="response_cache { enable: true }")
    source = ModelRepository([model.parent]).source(ModelId("a"))
    (model / "1" / "model.bin").write_bytes(b"more weights")
    loads: list[bytes] = []
    monkeypatch.setattr(Model, "use_cache", lambda _, cache, load, threads: loads.append(load))
    cache, threads = SharedCache(), load_threads(1)
    cache.shared = shared
    residents = Residents(ModelMemory(), threads, FactsFolder(None), lambda: None)
    find = ModelRegistry().find
    parts = SharedParts(cache, None, find, Closings(), threads, threads, residents)
    loader = ModelLoader(Backends(ScriptedBackend()), ModelSettings(), no_infer, parts)
    loaded = await soon(loader.load(source, 1))
    await soon(loaded.close())
    threads.close()
    assert (loads == [identity(model, config=loaded.config)]) is shared
    assert loads != [shared_load(source, loaded.config, 1, model / "1")]
