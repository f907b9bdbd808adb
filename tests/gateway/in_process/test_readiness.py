"""Readiness checks of models in a program."""

from pathlib import Path

import pytest

from gateway.in_process.server import Server

MODEL = """
import pathlib

class TritonPythonModel:
    def execute(self, requests):
        pass

    def is_ready(self):
        return not (pathlib.Path(__file__).parent / "sick").exists()
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model that is sick while a file is there."""
    folder = tmp_path / "sick" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL)
    (tmp_path / "sick" / "config.pbtxt").write_text(
        'backend: "python" instance_group { kind: KIND_CPU }'
    )
    return tmp_path


def test_a_model_may_say_that_it_is_not_ready(repository: Path) -> None:
    with Server(model_repository=str(repository)) as server:
        assert server.ready()
        assert server.model("sick").ready()
        (repository / "sick" / "1" / "sick").touch()
        assert not server.model("sick").ready()
        assert not server.ready()


async def test_the_same_where_the_server_shares_the_loop(repository: Path) -> None:
    async with Server(model_repository=str(repository)) as server:
        assert await server.async_ready()
        (repository / "sick" / "1" / "sick").touch()
        assert not await server.model("sick").async_ready()
        assert not await server.async_ready()
        # What cannot wait cannot ask.
        assert server.model("sick").ready()
