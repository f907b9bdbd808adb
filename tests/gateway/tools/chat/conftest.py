"""A running server with models to chat with."""

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.raw import Connection
from tests.serving import Serving, serving, wait_until, write_model

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True)
class Talking:
    """A server whose model `talker` follows instructions; `plain` cannot chat, `bare` is not
    loaded."""

    server: Serving
    repository: Path

    def flags(self, wire: str) -> list[str]:
        """The address at which `sluice chat` finds it by a wire."""
        return self.by_http if wire == "http" else ["--url", self.server.grpc]

    @property
    def by_http(self) -> list[str]:
        """The address at which `sluice chat` finds it by HTTP."""
        return ["--http", "--url", self.server.http]

    @contextmanager
    def bare_loaded(self) -> Iterator[None]:
        """Have the model `bare` for the length of the block."""
        self._tell_repository("bare/load")
        try:
            yield
        finally:
            self._tell_repository("bare/unload")

    def wait_stopped(self, question: str) -> None:
        """Wait until the model has noticed the disconnect."""
        file = self.repository / "talker" / "stopped"
        wait_until(lambda: file.exists() and file.read_text() == question, "the model stopped")

    def _tell_repository(self, path: str) -> None:
        with Connection(self.server.ports["http"]) as connection:
            connection.ask(f"/v2/repository/models/{path}", {})
            assert connection.answer().status == 200


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talking]:
    """The server, for all tests of the chat."""
    repository = tmp_path_factory.mktemp("chat") / "models"
    shutil.copytree(MODELS, repository)
    write_model(repository, "plain", 'backend: "identity"\n')
    with serving(repository, *EXPLICIT) as server:
        yield Talking(server, repository)


EXPLICIT = ("--model-control-mode=explicit", "--load-model=talker", "--load-model=plain")


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that refuses connections: no other process may listen there meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
