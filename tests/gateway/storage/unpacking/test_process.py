"""One process unpacks model after model, and ends with its parent."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.storage.store import StoreError
from gateway.storage.unpacking.process import COMMAND, Unpacker
from tests.packages import Site
from tests.serving import ROOT

# Stands in for the library of light_onnx: what it "saves" is the process that it runs in.
ONNX = b"""
import os
from types import SimpleNamespace

def load(path):
    print("libraries print what they like")
    graph = SimpleNamespace(initializer=[], input=[])
    return SimpleNamespace(ir_version=3, graph=graph)

def save(model, path):
    path.write_text(str(os.getpid()))
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Modules for the processes that are started."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    site = Site(tmp_path)
    site.write("onnx.py", ONNX)
    return site


@pytest.fixture
def unpacker() -> Iterator[Unpacker]:
    with Unpacker() as unpacker:
        yield unpacker


def unpack(unpacker: Unpacker, folder: Path) -> str:
    unpacker.unpack("light_onnx", folder / "x", folder, ignore)
    return (folder / "model.onnx").read_text()


def ignore(step: str, done: float) -> None:
    """Progress that is not shown."""


def test_one_process_unpacks_one_model_after_the_other(
    site: Site, unpacker: Unpacker, tmp_path: Path
) -> None:
    assert unpack(unpacker, tmp_path) == unpack(unpacker, tmp_path)


def test_after_a_failure_the_next_model_gets_a_new_process(
    site: Site, unpacker: Unpacker, tmp_path: Path
) -> None:
    first = unpack(unpacker, tmp_path)
    with pytest.raises(
        StoreError, match=r"unpacking '.*/x' failed: ModuleNotFoundError: No module"
    ):
        unpacker.unpack("no_such_module", tmp_path / "x", tmp_path, ignore)
    assert unpack(unpacker, tmp_path) != first


def test_steps_are_reported_with_growing_fractions_below_one(
    site: Site, unpacker: Unpacker, tmp_path: Path
) -> None:
    told: list[tuple[str, float]] = []
    unpacker.unpack(
        "light_onnx", tmp_path / "x", tmp_path, lambda step, done: told.append((step, done))
    )
    assert [step for step, _ in told] == ["starting", "reading", "writing"]
    shares = [done for _, done in told]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] < 1


def test_the_process_ends_with_its_parent(site: Site, tmp_path: Path) -> None:
    site.write("onnx.py", b"import threading; threading.Event().wait()")
    order = json.dumps(["light_onnx", str(tmp_path / "x"), str(tmp_path)]).encode() + b"\n"
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(order)
        process.stdin.flush()
        assert b"starting" in process.stdout.readline()
        process.stdin.close()
        assert process.wait(timeout=30) == 1


def test_only_installed_packages_decide_what_is_imported() -> None:
    assert COMMAND[:2] == (sys.executable, "-P")
