"""The memory of models: declared, measured, and estimated from their files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config import InstanceGroup, InstanceKind, ModelConfig
from gateway.memory_settings import ModelMemory
from gateway.models.kept_facts import FactsFolder, KeptFacts
from gateway.models.limits import ResidenceRules, SleepLevel
from gateway.models.memory import LoadMeasures, budget_of, file_bytes, memory_in_use, needs_of
from gateway.models.residence import Memory
from gateway.threads import load_threads
from tests.serving import WAIT_SECS, wait_until

CPU = InstanceGroup(kind=InstanceKind.KIND_CPU, count=2)
TWO_GPUS = InstanceGroup(kind=InstanceKind.KIND_GPU, count=1, gpus=(0, 3))
ENGINE = InstanceGroup(kind=InstanceKind.KIND_MODEL, count=1)
LARGE = 64 << 20


@pytest.mark.parametrize(
    ("group", "rules", "measured", "found"),
    [
        (CPU, ResidenceRules(), {}, {"host": 240}),
        (TWO_GPUS, ResidenceRules(), {}, {"gpu 0": 120, "gpu 3": 120}),
        (ENGINE, ResidenceRules(), {}, {"gpu 1": 120}),
        (CPU, ResidenceRules(), {"host": 77}, {"host": 77}),
        (ENGINE, ResidenceRules(), {"host": 77}, {"gpu 1": 120, "host": 77}),
        (TWO_GPUS, ResidenceRules(memory=5), {"host": 77}, {"gpu 0": 5, "gpu 3": 5}),
        (ENGINE, ResidenceRules(sleep=SleepLevel.LEVEL_1), {}, {"gpu 1": 120, "host": 100}),
    ],
    ids=["cpu", "gpus", "engine", "measured", "in_part", "declared", "level_1"],
)
def test_needs_are_declared_or_measured_or_those_of_the_files(
    group: InstanceGroup, rules: ResidenceRules, measured: Memory, found: Memory
) -> None:
    config = ModelConfig(name="m", instance_group=(group,))
    assert needs_of(config, rules, (1,), 100, measured) == {**found, "models": 1}


def test_a_budget_has_the_places_that_are_limited() -> None:
    assert budget_of(ModelMemory()) == {}
    given = ModelMemory(host=1, gpus={2: 3}, models=4)
    assert budget_of(given) == {"host": 1, "gpu 2": 3, "models": 4}


def test_the_memory_of_descendants_counts() -> None:
    program = f"import sys; held = bytearray({LARGE}); print('ready', flush=True); sys.stdin.read()"
    before = memory_in_use(os.getpid(), ())["host"]
    shell = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, program]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert memory_in_use(os.getpid(), ())["host"] - before > 0.9 * LARGE
        child.communicate(timeout=WAIT_SECS)
    wait_until(lambda: memory_in_use(os.getpid(), ())["host"] - before < LARGE, "it is gone")


def test_a_process_whose_name_is_cut_within_a_character_counts(tmp_path: Path) -> None:
    for process, name, parent in [(1, b"server", 0), (7, b"Antwort\xc3", 1), (8, b") R 5", 7)]:
        folder = tmp_path / str(process)
        folder.mkdir()
        (folder / "stat").write_bytes(b"%d (%s) S %d 0" % (process, name, parent))
        (folder / "smaps_rollup").write_text(f"Rss: 99 kB\nPss: {process} kB\n")
    assert memory_in_use(1, (), tmp_path) == {"host": 16 << 10}


async def test_a_gpu_whose_memory_cannot_be_read_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    threads = load_threads(1)
    measures = LoadMeasures(threads, (2,))
    for _ in range(2):
        assert (await measures.begin()).memory.keys() == {"host"}
    threads.close()
    (found,) = caplog.records
    assert (found.levelname, found.__dict__["gpu"]) == ("WARNING", 2)


def test_facts_hold_for_one_load_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    version, kept = tmp_path / "m" / "1", tmp_path / "kept"
    folder, facts = FactsFolder(kept), KeptFacts("one", {"host": 5}, 1.5, ("odd",), 512)
    assert folder.read(version, "one") is None
    folder.write(version, facts)
    assert folder.read(version, "one") == facts
    assert folder.read(version, "other") is None
    (file,) = kept.iterdir()
    file.write_bytes(b"{")
    assert folder.read(version, "one") is None
    FactsFolder(file).write(version, facts)
    assert FactsFolder(None).read(version, "one") is None


def test_the_size_of_a_version_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"345")
    assert file_bytes(tmp_path) == 5
