"""One server with the real engine and the model of one layer as a GGUF."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.llama import SHIPPED, Llama, stored_gguf, write_laptop
from tests.serving import Serving, serving

BLOCKS = 96
"""The cache of the tests holds 3,072 tokens, which prompts of tests exceed."""


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The stored file; without it, or without the library, the tests are skipped."""
    return stored_gguf()


@pytest.fixture(scope="session")
def repository(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped config for laptops with that model and a small cache."""
    found = tmp_path_factory.mktemp("repository")
    shutil.copytree(SHIPPED, found / "llama")
    write_laptop(found, gguf, num_kv_blocks=BLOCKS)
    return found


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[Serving]:
    with serving(repository, "--model-config-name=laptop") as started:
        yield started
    assert started.process.returncode == 0, started.text
    assert not any(line.startswith("Traceback") for line in started.log), started.text


@pytest.fixture
def llama(server: Serving) -> Iterator[Llama]:
    with Llama(server) as found:
        yield found
