"""Models that run for the length of one test, and leave nothing behind."""

import asyncio
import datetime
import gc
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import suppress
from functools import cache
from random import Random, SystemRandom
from typing import Any, Protocol

import pytest
from httpx import create_ssl_context

from gateway import cuda_driver
from gateway.backend import Instance
from gateway.config import ModelConfig
from gateway.models.instance_groups import InstanceSlot
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from gateway.policy.tenants import Tenants
from gateway.process_limits import collect_garbage_rarely
from gateway.shared_memory import cuda
from tests import needs
from tests.builders import TEXT, soon
from tests.certificates import Authority, Certificate
from tests.distribution import ModuleScheduling
from tests.host_gpu import HostGpu
from tests.one_router import asks_one_router
from tests.serving import EVERY_SERVER, FLEET, ROUTERS

KINDS = {
    "": (),
    "@grpcio": ("--grpc-transport=grpcio",),
    "@frontends": ("--frontends=2",),
}
"""Servers that tests marked `runs_on` run on, with their flags; the first is the default."""


collect_garbage_rarely()

# Else tests that import OpenVINO before its backend would send an event to its makers.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--grpc-transport` has every server carry gRPC by another transport than its default.

    `--every-step` and `--sweep-seed` are those of `tests/sweep`: the whole product, or the sample
    of a seed. By default the seed is the date, so that each day has another sample. `--fleet-seed`
    and a test's name choose the routers that it asks.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parser.addoption("--every-step", action="store_true", help="sweep every step of every case")
    parser.addoption("--sweep-seed", default=today, help="the sample of the sweeps (%(default)s)")
    parser.addoption("--grpc-transport", choices=("hyper", "grpcio"))
    parser.addoption("--frontends", help="have every server leave connections to N processes")
    parser.addoption("--fleet", type=int, help="have every server be two routers of N replicas")
    parser.addoption(
        "--fleet-seed", default=str(SystemRandom().getrandbits(32)), help="of those choices"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hand the option to the servers, and have processes under test begin as a terminal's do.

    A shell has its background jobs ignore SIGINT, and their child processes inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    transport = config.getoption("--grpc-transport")
    if transport is not None:
        EVERY_SERVER.append(f"--grpc-transport={transport}")
    if frontends := config.getoption("--frontends"):
        EVERY_SERVER.append(f"--frontends={frontends}")
    if replicas := config.getoption("--fleet"):
        FLEET.append(replicas)


def pytest_report_header(config: pytest.Config) -> str:
    """The seed of a fleet's choices."""
    return f"--fleet-seed={config.getoption('--fleet-seed')}" if FLEET else ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose the routers of a fleet that a test asks."""
    if FLEET:
        seed = f"{item.config.getoption('--fleet-seed')} {item.nodeid}"
        ROUTERS[:] = [] if asks_one_router(item) else [Random(seed)]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Each client of httpx would read all certificates of the machine: 40 ms of processor time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(create_ssl_context))
        return (yield)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked `runs_on` run on the default and on those kinds of servers.

    With an option that chooses the servers, each test runs once.
    """
    marker = metafunc.definition.get_closest_marker("runs_on")
    if marker is not None and not (EVERY_SERVER or FLEET):
        others = [pytest.param(f"@{kind}", marks=pytest.mark.wire) for kind in marker.args]
        metafunc.parametrize(
            "server_kind", ["", *others], ids=lambda kind: kind, indirect=True, scope="module"
        )


MARKERS_IN_TEXT = ("mark.vllm", "mark.browser", "mark.node", "mark.quiet", "mark.both")
"""The Makefile finds the modules of these markers by their text."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a marker that the Makefile would not find; skip what a router does not have."""
    if FLEET:
        needs.skip_own_models(items)
    paths = {item.path for item in items}
    texts = {path: path.read_text().replace("engine_marks", "mark.vllm") for path in paths}
    for item in items:
        text = texts[item.path]
        for marker in MARKERS_IN_TEXT:
            if item.get_closest_marker(marker.removeprefix("mark.")) and marker not in text:
                raise pytest.UsageError(f"{item.path}: `{marker}` stands in another module")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported modules from garbage collection, during their import and ever after.

    Hundreds of tests collect garbage: among the objects of torch that takes half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def server_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kind of the servers of a test; fixtures of one server for several tests depend on it."""
    before = EVERY_SERVER[:]
    EVERY_SERVER.extend(KINDS[getattr(request, "param", "")])
    yield
    EVERY_SERVER[:] = before


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ModuleScheduling:
    """With `-n` modules are distributed, and engines are started in one process."""
    return ModuleScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """One line counts the tests that a machine cannot run for the same reason."""
    return needs.folded((yield))


@pytest.fixture
def host_gpu(monkeypatch: pytest.MonkeyPatch) -> HostGpu:
    """This process finds a GPU, whose memory is of the host."""
    found = HostGpu()
    for module in (cuda_driver, cuda):
        monkeypatch.setattr(module, "load_driver", lambda: found)
    return found


Load = Callable[[], Awaitable[Instance]]


class Serve(Protocol):
    """Makes a model of instances, and runs it until the test ends."""

    def __call__(
        self,
        *instances: Instance,
        config: ModelConfig = TEXT,
        load: Load | None = None,
        on_change: Callable[[], None] | None = None,
        tenants: Tenants | None = None,
    ) -> Model: ...


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Run models; when the test ends none of them has a request, and no task is left."""
    running: list[tuple[Model, asyncio.Task[None]]] = []

    def start(
        *instances: Instance,
        config: ModelConfig = TEXT,
        load: Load | None = None,
        on_change: Callable[[], None] | None = None,
        tenants: Tenants | None = None,
    ) -> Model:
        slots = [
            InstanceSlot(load or _nothing_to_load, instance=instance) for instance in instances
        ]
        model = Model(config, 1, ModelStatistics(), slots, tenants=tenants)
        running.append((model, asyncio.create_task(model.run(on_change or _ignore_change))))
        return model

    yield start
    left = {model.name: (len(model.requests), model.statistics.pending) for model, _ in running}
    for model, task in running:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await soon(task)
        await soon(model.close())
    assert left == dict.fromkeys(left, (0, 0)), "requests in flight and pending"
    assert tasks_left() == []


def tasks_left() -> list[asyncio.Task[object]]:
    """All tasks but the one that asks."""
    mine = asyncio.current_task()
    return [task for task in asyncio.all_tasks() if task is not mine]


async def _nothing_to_load() -> Instance:
    raise AssertionError("the test has nothing to load")


def _ignore_change() -> None:
    """Called when what is ready may have changed."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of the module's certificates."""
    return Authority(tmp_path_factory.mktemp("certificates") / "authority")


@pytest.fixture(scope="module")
def own(authority: Authority) -> Certificate:
    """The certificate of the module's server."""
    return authority.issue("server")
