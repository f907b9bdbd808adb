"""Fetching: an error is one clear line, and stored models are not changed."""

import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from gateway.storage import fetch as fetching
from gateway.storage.fetch import Embedded, fetch, fetch_all
from gateway.storage.store import ModelStore, StoreError
from gateway.storage.unpacking.process import Unpacker
from tests.packages import Site
from tests.serving import ROOT

TINY = Embedded(
    name="tiny",
    distribution="tiny-models",
    files=("tiny.onnx",),
    unpacking="light_onnx",
    packages=("onnx",),
    unpacked_bytes=1,
)
OTHER = replace(TINY, name="other", distribution="other-models", files=("other.onnx",))

# Unpacks for light_onnx as the real package would: a graph without weights, and a file.
ONNX = b"""
from types import SimpleNamespace

def load(path):
    graph = SimpleNamespace(initializer=[], input=[])
    return SimpleNamespace(ir_version=3, graph=graph, content=path.read_bytes())

def save(model, path):
    path.write_bytes(model.content)
"""


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


@pytest.fixture
def unpacker() -> Iterator[Unpacker]:
    with Unpacker() as unpacker:
        yield unpacker


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Packages for this process, and for those that it starts."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(ROOT))))
    monkeypatch.setattr(fetching, "EMBEDDED", (TINY, OTHER))
    site = Site(folder)
    site.install(TINY.distribution, {"tiny.onnx": b"tiny"})
    site.install(OTHER.distribution, {"other.onnx": b"other"})
    site.write("onnx.py", ONNX)
    return site


def console() -> tuple[Console, StringIO]:
    written = StringIO()
    return Console(file=written, width=20), written


def ignore(step: str, done: float) -> None:
    """Progress that is not shown."""


def test_all_models_are_fetched_step_by_step_when_none_is_named(
    store: ModelStore, site: Site
) -> None:
    shown, written = console()
    fetch_all([], store, shown)
    steps = ("starting", "reading", "writing")
    assert written.getvalue().splitlines() == [
        *(f"tiny: {step}" for step in steps),
        f"tiny: {store.path('tiny')}",
        *(f"other: {step}" for step in steps),
        f"other: {store.path('other')}",
    ]
    assert (store.path("tiny") / "model.onnx").read_bytes() == b"tiny"
    assert (store.path("other") / "model.onnx").read_bytes() == b"other"


def test_a_step_that_is_reported_often_is_one_line(
    store: ModelStore, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ["starting", "weights", "weights", "weights", "writing"]
    reports = [(step, number / 5) for number, step in enumerate(steps)]
    monkeypatch.setattr(Unpacker, "unpack", lambda *given: [given[-1](*each) for each in reports])
    shown, written = console()
    fetch_all(["tiny"], store, shown)
    lines = written.getvalue().splitlines()
    assert lines[:-1] == ["tiny: starting", "tiny: weights", "tiny: writing"]


def test_only_the_named_models_are_fetched(store: ModelStore, site: Site) -> None:
    fetch_all(["other"], store, console()[0])
    assert store.has("other")
    assert not store.has("tiny")


def test_an_unknown_name_is_refused_before_anything_is_unpacked(
    store: ModelStore, site: Site
) -> None:
    with pytest.raises(StoreError, match="no model 'gpt-9' to fetch; there is: tiny, other"):
        fetch_all(["tiny", "gpt-9"], store, console()[0])
    assert not store.has("tiny")


def test_a_model_that_fails_does_not_keep_the_others_from_being_fetched(
    store: ModelStore, site: Site
) -> None:
    site.write("tiny.onnx", b"tin")
    with pytest.raises(StoreError, match=r"^'.*tiny.onnx' is damaged: it has 3 bytes"):
        fetch_all([], store, console()[0])
    assert not store.has("tiny")
    assert store.has("other")


def test_a_model_that_cannot_be_unpacked_does_not_spoil_the_process_for_the_next(
    store: ModelStore, site: Site
) -> None:
    broken = b"    if path.name == 'tiny.onnx': raise OSError('the disk is broken')\n"
    site.write("onnx.py", ONNX.replace(b"    graph", broken + b"    graph", 1))
    with pytest.raises(StoreError, match=r"failed: OSError: the disk is broken$"):
        fetch_all([], store, console()[0])
    assert not store.has("tiny")
    assert store.has("other")


def test_what_unpacking_needs_is_named_when_it_is_not_installed(
    store: ModelStore, site: Site, unpacker: Unpacker
) -> None:
    needy = replace(TINY, packages=("json", "no_such_package"))
    both = "needs no_such_package, which the extras 'cpu' and 'cuda' of sluice install$"
    with pytest.raises(StoreError, match=both):
        fetch(needy, store, unpacker, ignore)
    one = "needs no_such_package, which the extra 'laptop' of sluice installs$"
    with pytest.raises(StoreError, match=one):
        fetch(replace(needy, extras=("laptop",)), store, unpacker, ignore)


def test_a_disk_that_is_too_small_is_reported_before_unpacking(
    store: ModelStore, site: Site, unpacker: Unpacker
) -> None:
    huge = replace(TINY, unpacked_bytes=2**70)
    with pytest.raises(StoreError, match=r"'tiny' needs [0-9]+ MB, and the disk of .* MB free"):
        fetch(huge, store, unpacker, ignore)


def test_a_disk_that_fills_up_during_unpacking_is_named_and_the_next_try_continues(
    store: ModelStore, site: Site, unpacker: Unpacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = b"    raise OSError('352512 requested and 2752 written')\n"
    site.write("onnx.py", ONNX.replace(b"    path.write_bytes", short + b"    path.write_bytes"))
    free = iter((1 << 30, 0))
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=next(free)))
        with pytest.raises(StoreError, match=r"^no space is left on the disk of '.*/models': make"):
            fetch(TINY, store, unpacker, ignore)
    site.write("onnx.py", ONNX)
    assert fetch(TINY, store, unpacker, ignore) == store.path("tiny")


def test_a_failure_while_unpacking_is_reported_and_leaves_nothing(
    store: ModelStore, site: Site, unpacker: Unpacker
) -> None:
    steps: list[str] = []
    site.write("onnx.py", b"raise OSError('the disk is broken')")
    message = f"unpacking '{site.folder / 'tiny.onnx'}' failed: OSError: the disk is broken"
    with pytest.raises(StoreError, match=re.escape(message)):
        fetch(TINY, store, unpacker, lambda step, done: steps.append(step))
    assert steps == ["starting"]
    assert not store.has("tiny")


def test_a_kill_for_memory_during_unpacking_is_named(
    store: ModelStore, site: Site, unpacker: Unpacker
) -> None:
    site.write("onnx.py", b"import os; os.kill(os.getpid(), 9)")
    with pytest.raises(StoreError, match="killed by signal 9; it needs about 1 GB of memory"):
        fetch(TINY, store, unpacker, ignore)
    assert not store.has("tiny")


def test_an_interrupt_while_unpacking_ends_at_once_and_leaves_nothing(
    store: ModelStore, site: Site, unpacker: Unpacker
) -> None:
    def interrupt(step: str, done: float) -> None:
        raise KeyboardInterrupt

    site.write("onnx.py", b"import threading; threading.Event().wait()")
    with pytest.raises(KeyboardInterrupt):
        fetch(TINY, store, unpacker, interrupt)
    assert not store.has("tiny")


def test_a_stored_model_is_only_located(store: ModelStore, site: Site) -> None:
    for name in ("tiny", "other"):
        store.publish(name, lambda folder: None, lambda: None)
    shown, written = console()
    started = time.perf_counter()
    fetch_all([], store, shown)
    assert time.perf_counter() - started < 0.2
    assert written.getvalue() == f"tiny: {store.path('tiny')}\nother: {store.path('other')}\n"
