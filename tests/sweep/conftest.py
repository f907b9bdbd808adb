"""A loop, a repository and a choice for each sweep. `tests/conftest.py` has the options."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from gateway.fleet import announcer, connection
from gateway.models import instances as instances_module
from tests.forked_children import children_fork
from tests.sweep.cases import ways_of
from tests.sweep.stand_in import install
from tests.sweep.steps import SteppedLoop
from tests.sweep.subjects import BY_NAME, SUBJECTS
from tests.sweep.sweep import Choice, chosen
from tests.sweep.ways import SUFFIXES

EVERY_STEP_SECS = 3600
SAMPLED = {"": 14, "grpcio": 3, "frontends": 3}
"""The number of models asked on each kind of server, unless every step is wanted."""
SAMPLED_EVENTS = 4
ALWAYS = frozenset({"direct_python", "dynamic_python"})
"""These are in each sample of disconnects: executions of workers overlap."""

FOLDER = Path(__file__).parent

Run = Callable[[Callable[[], Awaitable[None]]], None]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark sweeps; those of every step may take long."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.sweep)
            if config.getoption("--every-step"):
                item.add_marker(pytest.mark.timeout(EVERY_STEP_SECS))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each model with each kind of server, or a sample that the seed determines."""
    if "suffix" in metafunc.fixturenames:
        metafunc.parametrize(("name", "suffix"), list(_pairs(metafunc.config)))
    elif "name" in metafunc.fixturenames:
        metafunc.parametrize("name", _names(metafunc))


def _pairs(config: pytest.Config) -> Iterator[tuple[str, str]]:
    for suffix in SUFFIXES:
        names = [each.name for each in SUBJECTS if ways_of(each, suffix)]
        count = len(names) if config.getoption("--every-step") else SAMPLED[suffix]
        picked = ALWAYS | chosen(f"{_seed(config)} {suffix}", names, min(count, len(names)))
        yield from ((name, suffix) for name in names if name in picked)


def _names(metafunc: pytest.Metafunc) -> list[str]:
    wanted = getattr(metafunc.module, "suits", lambda subject: not subject.endless)
    names = [each.name for each in SUBJECTS if wanted(each)]
    if metafunc.config.getoption("--every-step"):
        return names
    seed = f"{_seed(metafunc.config)} {metafunc.function.__name__}"
    picked = chosen(seed, names, min(SAMPLED_EVENTS, len(names)))
    return [name for name in names if name in picked]


def _seed(config: pytest.Config) -> str:
    return str(config.getoption("--sweep-seed"))


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    """Workers of the Python backend are forks: hundreds start, each in a fifth of the time."""
    with children_fork():
        yield


@pytest.fixture
def choice(request: pytest.FixtureRequest) -> Choice:
    """The steps of the sweep; printed, so that a failure can be repeated."""
    found = Choice(_seed(request.config), request.config.getoption("--every-step"))
    sys.stdout.write(f"repeat with --sweep-seed={found.seed}\n")
    return found


@pytest.fixture
def subject(name: str) -> object:
    """The model of that name."""
    return BY_NAME[name]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for models; temporary files of the server are in another one."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.syspath_prepend(str(install(tmp_path / "installed")))
    monkeypatch.setattr(instances_module, "FIRST_BACKOFF_SECS", 0.0)
    monkeypatch.setattr(connection, "LONGEST_PAUSE_SECS", 0.001)
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.001)
    monkeypatch.setattr(announcer, "LOAD_SECS", 0.001)
    models = tmp_path / "models"
    models.mkdir()
    return models


@pytest.fixture
def run(repository: Path) -> Iterator[Run]:
    """Runs a coroutine function to its end in a SteppedLoop."""
    assert os.environ["TMPDIR"] == tempfile.gettempdir()
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        yield lambda main: runner.run(_awaited(main))


async def _awaited(main: Callable[[], Awaitable[None]]) -> None:
    await main()
