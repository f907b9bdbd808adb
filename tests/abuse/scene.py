"""The scene of a case: a server, the ways to ask it, and the checks of each answer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.raw import Answer, Connection, post
from tests.serving import ROOT, Serving

KEY = "sk-sluice-MARKERID-marker-secret"
PROMPT = "marker prompt of a client"
INTERNAL = ("Traceback", "site-packages", '.py"', str(ROOT), str(Path.home()))
"""Texts that no answer has: a place in the code, or a folder of this host."""


@dataclass(slots=True)
class Scene:
    """A server under a case; `check` passes texts that a client may see."""

    server: Serving
    repository: Path
    seen: list[str] = field(default_factory=list)
    """The texts of all answers."""

    @property
    def http(self) -> int:
        """The port of HTTP."""
        return self.server.ports["http"]

    @property
    def grpc(self) -> int:
        """The port of gRPC."""
        return self.server.ports["grpc"]

    def check(self, text: str) -> str:
        """The text of an answer, which shows nothing internal."""
        for each in (*INTERNAL, str(self.repository), KEY):
            assert each not in text, text[:500]
        self.seen.append(text)
        return text

    def ask(self, path: str, body: Any, *headers: str) -> Answer:
        """The answer to a POST on a connection of its own; `body` is JSON or bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with Connection(self.http) as connection:
            connection.send_as_taken(post(path, data, "Content-Type: application/json", *headers))
            return self.answer(connection)

    def answer(self, connection: Connection) -> Answer:
        """The next answer of a connection."""
        found = connection.answer()
        self.check(found.body.decode(errors="replace"))
        return found

    def refused(self, answer: Answer, statuses: Sequence[int], text: str = "") -> None:
        """Check that an answer is an error with one of these statuses, and has the text."""
        assert answer.status in statuses, (answer.status, answer.body[:300])
        assert text in answer.body.decode(errors="replace"), answer.body[:300]
