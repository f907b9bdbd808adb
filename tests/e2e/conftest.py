"""Three servers for all tests that need no server of their own.

The first has the model of one layer, whose tokens take the real engine a millisecond.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.backends.vllm.adapters import write_adapter
from tests.conformance.models import identity
from tests.e2e.llama import (
    DTYPE,
    Llama,
    stored_folder,
    stored_gguf,
    write_laptop,
    write_llama,
)
from tests.e2e.shared_server import SharedServer
from tests.fork_server import forked_with_engines
from tests.one_layer import write_one_layer
from tests.serving import Serving, write_model

MAX_IN_FLIGHT = 100
MAX_RUNNING = 8
BLOCKS = MAX_RUNNING * 8192 // 32
"""Of the cache: no stream has to wait for another's end, however long both are."""
SEND_TIMEOUT_SECS = 1
FIRST_RESPONSE_SECS = 2
EXIT_TIMEOUT_SECS = 3
FLAGS = (
    f"--send-timeout-secs={SEND_TIMEOUT_SECS}",
    f"--http-first-response-secs={FIRST_RESPONSE_SECS}",
    f"--exit-timeout-secs={EXIT_TIMEOUT_SECS}",
    "--metrics-config=histogram_latencies=true",
)

ADAPTER = "odd"
FOLDER = Path(__file__).parent
LAST = ("ended_server", "ended_other_server")
"""Fixtures of tests that end a shared server."""
SHARED = {"vllm": "shared_server", "openvino_genai": "shared_laptop_server"}
"""The fixture of the shared server by the engine of its model."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder run last, by their server, so that few engines of vLLM run.

    Two do, or three while a test has two replicas.
    """
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, bool]:
    """First the other server, then servers of single tests; tests that end a server end a group."""
    if not item.path.is_relative_to(FOLDER):
        return 0, False
    names = set(getattr(item, "fixturenames", ()))
    group = 1 if "shared_other_server" in names else 3 if "server" in names else 2
    return group, not names.isdisjoint(LAST)


@pytest.fixture(scope="session")
def stored_model() -> Path:
    """The folder of the model; without it, or without vLLM, the tests are skipped."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    return stored_folder()


@pytest.fixture(scope="session")
def one_layer(stored_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model of one layer."""
    return write_one_layer(tmp_path_factory.mktemp("models") / "one-layer", stored_model)


@pytest.fixture(scope="session")
def shared_server(
    one_layer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    """A server whose model has an adapter, custom metrics and limits."""
    repository = tmp_path_factory.mktemp("repository")
    arguments = {
        "model": str(one_layer),
        "dtype": DTYPE,
        "max_num_seqs": MAX_RUNNING,
        "enable_lora": True,
        "max_lora_rank": 8,
    }
    write_llama(repository, arguments, max_in_flight=MAX_IN_FLIGHT, REPORT_CUSTOM_METRICS="true")
    folder = repository / "llama" / "1"
    write_adapter(folder / ADAPTER, rank=8)
    (folder / "multi_lora.json").write_text(json.dumps({ADAPTER: ADAPTER}))
    shared = SharedServer(repository, FLAGS, start=forked_with_engines)
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def shared_other_server(
    stored_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    """A server with the real model and no compiler; it has a parser of thoughts, and no restarts.

    The parser reads text, and so needs no tokens that this model does not have. A second model
    needs no engine. This server and its engine start as users start them.
    """
    repository = tmp_path_factory.mktemp("repository")
    write_llama(repository, reasoning_parser="olmo3", restart_tries=0)
    write_model(repository, "echo", identity("BYTES", "1"))
    cache = tmp_path_factory.mktemp("cache")
    shared = SharedServer(repository, environment=environment("no-such-compiler", cache))
    yield shared
    shared.close()


def environment(compiler: str, cache: Path) -> dict[str, str]:
    """Torch compiles by this program, and finds nothing that it compiled before."""
    return {"CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": str(cache)}


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The stored file of the same model; without it, or without its engine, tests are skipped."""
    return stored_gguf()


@pytest.fixture(scope="session")
def shared_laptop_server(
    gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    """A server as the first, whose model is computed by OpenVINO GenAI."""
    repository = tmp_path_factory.mktemp("repository")
    write_llama(repository, max_in_flight=MAX_IN_FLIGHT)
    write_laptop(repository, gguf, max_num_seqs=MAX_RUNNING, num_kv_blocks=BLOCKS)
    shared = SharedServer(repository, ("--model-config-name=laptop", *FLAGS))
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Serving:
    """The server that every test leaves without a request; `every_engine` asks for all engines."""
    shared: SharedServer = request.getfixturevalue(SHARED[getattr(request, "param", "vllm")])
    return shared.get()


@pytest.fixture
def engine(request: pytest.FixtureRequest, server: Serving) -> str:
    """The backend of that server's model."""
    found: str = request.node.callspec.params.get("server", "vllm")
    return found


@pytest.fixture(scope="module")
def other_server(shared_other_server: SharedServer) -> Serving:
    """The server with a parser of thoughts and without a compiler."""
    return shared_other_server.get()


@pytest.fixture
def ended_server(server: Serving) -> Serving:
    """That server, for a test that ends it."""
    return server


@pytest.fixture
def ended_other_server(shared_other_server: SharedServer) -> Serving:
    """The other server, for a test that ends it."""
    return shared_other_server.get()


@pytest.fixture
def llama(server: Serving) -> Iterator[Llama]:
    """The model of that server."""
    with Llama(server) as found:
        yield found
