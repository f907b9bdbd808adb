"""The model store has complete models only, also after interrupts and concurrent builds."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.storage.store import ModelStore, StoreError, default_root

BUILDER = """
import sys
from pathlib import Path
from gateway.storage.store import ModelStore

def tell(word):
    sys.stdout.write(word + "\\n")
    sys.stdout.flush()

def build(folder):
    (folder / "weights").write_text("half")
    tell("building")
    sys.stdin.readline()
    (folder / "weights").write_text("whole")

ModelStore(Path(sys.argv[1])).publish("tiny", build, lambda: tell("waiting"))
tell("stored")
"""


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def write_weights(folder: Path) -> None:
    (folder / "weights").write_text("whole")


def never(*_: object) -> None:
    raise AssertionError("called, but nothing was to be built or waited for")


@contextmanager
def building_process(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that builds model `tiny` and stops half-way until it gets a line."""
    command = [sys.executable, "-W", "error", "-c", BUILDER, str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def folders(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()}


def test_a_published_model_is_there_with_its_files(store: ModelStore) -> None:
    assert not store.has("tiny")
    folder = store.publish("tiny", write_weights, never)
    assert store.has("tiny")
    assert folder == store.path("tiny")
    assert (folder / "weights").read_text() == "whole"


def test_a_stored_model_is_not_built_again(store: ModelStore) -> None:
    store.publish("tiny", write_weights, never)
    store.publish("tiny", never, never)


def test_a_model_is_not_visible_while_it_is_built(store: ModelStore) -> None:
    def build(folder: Path) -> None:
        write_weights(folder)
        assert not store.has("tiny")
        assert not store.path("tiny").exists()

    store.publish("tiny", build, never)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(
    store: ModelStore, tmp_path: Path, interruption: type[BaseException]
) -> None:
    def build(folder: Path) -> None:
        write_weights(folder)
        raise interruption

    with pytest.raises(interruption):
        store.publish("tiny", build, never)
    assert not store.has("tiny")
    assert folders(tmp_path / "models") == {".building"}
    store.publish("tiny", write_weights, never)
    assert store.has("tiny")


def test_files_of_a_killed_process_are_removed_unused(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    with building_process(tmp_path) as process:
        assert said(process) == "building"
    assert not store.has("tiny")
    assert len(folders(tmp_path / ".building")) == 2

    store.publish("tiny", write_weights, never)
    assert (store.path("tiny") / "weights").read_text() == "whole"
    assert folders(tmp_path) == {".building", "tiny"}


def test_of_two_processes_that_start_at_once_one_builds_and_both_have_the_model(
    tmp_path: Path,
) -> None:
    with building_process(tmp_path) as first:
        assert said(first) == "building"
        with building_process(tmp_path) as second:
            assert said(second) == "waiting"
            first.communicate("go on\n", timeout=10)
            assert said(second) == "stored"
    assert ModelStore(tmp_path).has("tiny")


def test_waiting_for_another_process_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    waited: list[str] = []
    impatient = ModelStore(tmp_path, lock_timeout_s=0.01)
    with building_process(tmp_path) as process:
        assert said(process) == "building"
        with pytest.raises(StoreError, match="another process has been unpacking model 'tiny'"):
            impatient.publish("tiny", never, lambda: waited.append("waiting"))
    assert waited == ["waiting"]


@pytest.mark.parametrize("damage", [lambda file: os.truncate(file, 2), os.unlink])
def test_a_model_with_a_damaged_file_is_not_used_but_built_again(
    store: ModelStore, damage: Callable[[Path], None]
) -> None:
    damage(store.publish("tiny", write_weights, never) / "weights")
    assert not store.has("tiny")
    store.publish("tiny", write_weights, never)
    assert (store.path("tiny") / "weights").read_text() == "whole"


def test_a_folder_that_the_store_did_not_complete_is_not_a_model(store: ModelStore) -> None:
    store.path("tiny").mkdir(parents=True)
    (store.path("tiny") / "weights").write_text("half")
    assert not store.has("tiny")


def test_a_damaged_manifest_means_that_the_model_is_not_there(store: ModelStore) -> None:
    for manifest in store.publish("tiny", write_weights, never).glob(".*.json"):
        manifest.write_text("{")
    assert not store.has("tiny")


def test_files_written_for_their_owner_only_become_readable_as_the_umask_says(
    store: ModelStore,
) -> None:
    def build(folder: Path) -> None:
        write_weights(folder)
        (folder / "weights").chmod(0o600)

    folder = store.publish("tiny", build, never)
    expected = folder.stat().st_mode & 0o666
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {expected}


@pytest.mark.parametrize("above", ["", "models"])
def test_a_cache_that_is_a_file_is_reported_with_its_path_and_a_way_out(
    tmp_path: Path, above: str
) -> None:
    file = tmp_path / "cache"
    file.write_text("")
    store = ModelStore(file / above)
    assert not store.has("tiny")
    with pytest.raises(StoreError, match=f"'{file}' is a file, .* or set SLUICE_CACHE"):
        store.publish("tiny", never, never)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "no space is left on the disk of"),
        (PermissionError(13, "Permission denied", "/x/y"), "no permission to write '/x/y'"),
        (OSError(5, "Input/output error"), "cannot be used: .*Input/output error"),
    ],
)
def test_what_the_disk_refuses_becomes_one_clear_error(
    store: ModelStore, error: OSError, message: str
) -> None:
    def build(_: Path) -> None:
        raise error

    with pytest.raises(StoreError, match=message):
        store.publish("tiny", build, never)


@pytest.mark.parametrize("name", ["", ".", "..", ".building", "a/b", "/etc"])
def test_a_name_that_is_a_path_is_never_a_stored_model(store: ModelStore, name: str) -> None:
    assert not store.has(name)
    with pytest.raises(StoreError, match="cannot be the name"):
        store.publish(name, never, never)


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"SLUICE_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c/models"),
        ({"SLUICE_CACHE": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/sluice/models"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/sluice/models"),
        ({"HOME": "/h"}, "/h/.cache/sluice/models"),
    ],
)
def test_the_models_are_in_the_users_cache(environment: dict[str, str], root: str) -> None:
    assert default_root(environment) == Path(root)


def test_without_any_cache_folder_the_error_names_the_variable_to_set() -> None:
    with pytest.raises(StoreError, match="set SLUICE_CACHE"):
        default_root({})


def test_the_manifest_names_each_file_with_its_size(store: ModelStore) -> None:
    folder = store.publish("tiny", write_weights, never)
    [manifest] = folder.glob(".*.json")
    assert json.loads(manifest.read_text()) == {"weights": 5}
