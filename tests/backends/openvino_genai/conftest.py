"""A server with the real engine and SmolLM2 as a GGUF of 8-bit weights."""

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway.settings import ENVIRONMENT
from gateway.storage.store import default_root
from tests.e2e.llama import SHIPPED, Llama
from tests.serving import Serving, serving

STORED = "smollm2-135m-instruct-gguf"
BLOCKS = 96
"""The cache of the tests holds 3,072 tokens, which prompts of tests exceed."""


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The stored file; without it, or without the library, the tests are skipped."""
    if find_spec("openvino_genai") is None:
        pytest.skip("openvino-genai is not installed")
    file = default_root(ENVIRONMENT) / STORED / "model.gguf"
    if not file.is_file():
        pytest.skip(f"the model is not stored: run `sluice fetch {STORED}`")
    return file


@pytest.fixture(scope="module")
def repository(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with the config for laptops and a small cache."""
    found = tmp_path_factory.mktemp("repository")
    shutil.copytree(SHIPPED, found / "llama")
    settings = found / "llama" / "1" / "laptop.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "num_kv_blocks": BLOCKS}))
    return found


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Serving]:
    with serving(repository, "--model-config-name=laptop") as started:
        yield started
    assert started.process.returncode == 0, started.text
    assert not any(line.startswith("Traceback") for line in started.log), started.text


@pytest.fixture
def llama(server: Serving) -> Iterator[Llama]:
    with Llama(server) as found:
        yield found
