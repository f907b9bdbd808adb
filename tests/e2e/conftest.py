"""One server with the real model for every test that leaves it as it was."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from tests.e2e.llama import Llama, shipped_arguments, write_llama
from tests.serving import Serving, serving

MAX_IN_FLIGHT = 100
MAX_RUNNING = 8
SEND_TIMEOUT_SECS = 1
FIRST_RESPONSE_SECS = 2


@pytest.fixture(scope="session")
def stored_model() -> Path:
    """The folder of the model; without it, or without vLLM, the tests are skipped."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    model = str(shipped_arguments()["model"])
    folder = default_root(ENVIRONMENT) / model
    if not (folder / "config.json").is_file():
        pytest.skip(f"the model is not stored: run `sluice fetch {model}`")
    return folder


@pytest.fixture(scope="session")
def server(stored_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that every test leaves without a request; however it was treated, it ends well."""
    repository = tmp_path_factory.mktemp("repository")
    write_llama(
        repository,
        {"max_num_seqs": MAX_RUNNING},
        max_in_flight=MAX_IN_FLIGHT,
        REPORT_CUSTOM_METRICS="true",
    )
    flags = (
        f"--send-timeout-secs={SEND_TIMEOUT_SECS}",
        f"--http-first-response-secs={FIRST_RESPONSE_SECS}",
        "--metrics-config=histogram_latencies=true",
    )
    with serving(repository, *flags) as started:
        yield started
    assert started.process.returncode == 0, started.text
    assert not [line for line in started.log if line.startswith("Traceback")], started.text


@pytest.fixture
def llama(server: Serving) -> Iterator[Llama]:
    """The model of that server."""
    with Llama(server) as found:
        yield found
