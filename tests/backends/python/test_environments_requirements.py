"""Environments of a requirements.txt: built once; failures are reported."""

import asyncio
import logging
import subprocess
from pathlib import Path

import pytest

from backends.python import environments
from backends.python.environment_builds import KeptFolders
from backends.python.environments import virtual_environment
from gateway.errors import Code, InferenceError
from tests.serving import wait_until
from tests.wheels import write_numpy, write_wheel

SLOW_PROJECT = """
[build-system]
requires = []
build-backend = "building"
backend-path = ["."]
"""
SLOW_BUILD = """
import os, pathlib, time

def get_requires_for_build_wheel(config_settings=None):
    pathlib.Path("pid").write_text(str(os.getpid()))
    time.sleep(600)
"""
OFFLINE = "--no-index\n--find-links wheels\n"

pytestmark = pytest.mark.timeout(180)


class BuildProgress(logging.Handler):
    """The lines that say how far an environment is."""

    def __init__(self) -> None:
        super().__init__()
        self.records: asyncio.Queue[logging.LogRecord] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put_nowait(record)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with two wheels in it."""
    folder = tmp_path / "greeter"
    write_wheel(folder / "wheels", "greeting", {"greeting.py": "TEXT = 'hello'\n"})
    write_numpy(folder / "wheels")
    return folder


def require(model: Path, *lines: str) -> Path:
    file = model / "requirements.txt"
    file.write_text(OFFLINE + "".join(f"{line}\n" for line in lines))
    return file


async def made(model: Path) -> Path:
    kept = KeptFolders(model.parent / "kept")
    return await virtual_environment(model / "requirements.txt", "greeter", kept)


def said(environment: Path, script: str) -> str:
    command = [environment / "bin" / "python", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


async def test_it_has_what_is_required_and_nothing_of_the_gateway(model: Path) -> None:
    require(model, "greeting")
    found = await made(model)
    assert said(found, "import greeting, numpy; print(greeting.TEXT, numpy.arange(2))") == (
        "hello [0 1]"
    )
    assert said(found, "import importlib.util as u; print(u.find_spec('fastapi'))") == "None"


async def test_it_is_made_once_for_what_it_is_made_of(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[tuple[str | Path, ...]] = []

    async def note(command: tuple[str | Path, ...], *_: object) -> None:
        builds.append(command)

    monkeypatch.setattr(environments, "run", note)
    (model / "more.txt").write_text("# nothing yet, / or ..\n")
    require(model, "greeting", "-r more.txt")
    both = await asyncio.gather(made(model), made(model))
    first = await made(model)
    assert both == [first, first]
    assert [each[-2:] for each in builds if "venv" in each] == [("venv", first)]
    (first / "noted").touch()
    require(model, "numpy", "-r more.txt")
    other = await made(model)
    (model / "more.txt").write_text("greeting\n")
    included = await made(model)
    assert len({first, other, included}) == 3
    (model / "more.txt").write_text("# nothing yet, / or ..\n")
    require(model, "greeting", "-r more.txt")
    assert (await made(model) / "noted").exists()


@pytest.mark.release
async def test_it_is_made_anew_for_other_wheels_and_if_it_is_incomplete(model: Path) -> None:
    require(model, "greeting")
    first = await made(model)
    (first / ".whole").unlink()
    (first / "left").touch()
    again = await made(model)
    assert again == first
    assert not (again / "left").exists()
    assert said(again, "import greeting; print(greeting.TEXT)") == "hello"
    write_wheel(model / "wheels", "greeting", {"greeting.py": "TEXT = 'hi'\n"}, "1.1")
    other = await made(model)
    assert other != first
    assert said(other, "import greeting; print(greeting.TEXT)") == "hi"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("nowhere==3", "No matching distribution found for nowhere==3"),
        pytest.param("./broken.whl", "broken.whl", marks=pytest.mark.release),
    ],
)
async def test_a_failure_is_reported_in_pips_words_without_paths_and_its_folder_is_removed(
    model: Path, line: str, text: str
) -> None:
    (model / "broken.whl").write_text("no archive")
    require(model, line)
    with pytest.raises(InferenceError) as refused:
        await made(model)
    assert refused.value.code is Code.UNAVAILABLE
    assert refused.value.message.startswith(
        "model 'greeter': the environment that its requirements.txt asks for cannot be made: "
    )
    assert text in refused.value.message
    assert str(model.parent) not in refused.value.message
    assert not [each for each in (model.parent / "kept").iterdir() if each.is_dir()]


def _content(file: Path) -> bytes:
    """Of a process that has ended, nothing: it is gone, or waits to be reaped."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


async def test_a_long_build_is_logged_and_ends_with_its_load(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = model / "slow"
    slow.mkdir()
    (slow / "pyproject.toml").write_text(SLOW_PROJECT)
    (slow / "building.py").write_text(SLOW_BUILD)
    require(model, "./slow")
    progress = BuildProgress()
    logger = logging.getLogger("sluice.python")
    logger.addHandler(progress)
    caplog.set_level(logging.INFO, logger.name)
    making = asyncio.create_task(made(model))
    try:
        async with asyncio.timeout(60):
            while not (slow / "pid").exists():
                record = await progress.records.get()
    finally:
        logger.removeHandler(progress)
        making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert vars(record)["model"] == "greeter"
    assert vars(record)["elapsed_secs"] >= 3
    assert vars(record)["says"]
    assert str(model) not in vars(record)["says"]
    command_line = Path("/proc", (slow / "pid").read_text(), "cmdline")
    wait_until(lambda: not _content(command_line), "the build has ended", 10)
    assert not [each for each in (model.parent / "kept").iterdir() if each.is_dir()]
