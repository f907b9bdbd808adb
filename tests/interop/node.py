"""RPCs by @grpc/grpc-js, the client of Node: each in a process of `grpc_js/client.js`."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests import needs
from tests.serving import ROOT, WAIT_SECS

FOLDER = Path(__file__).with_name("grpc_js")
PROTO = ROOT / "proto" / "grpc_service.proto"


def need_client() -> None:
    """Skip the test where there is no such client."""
    needs.program("node", package="nodejs npm")
    if not (FOLDER / "node_modules").is_dir():
        needs.lacking("grpc-js", f"run `npm ci --prefix {FOLDER.relative_to(ROOT)}`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of an RPC; bytes are base64."""

    code: int
    details: str
    responses: list[Any]
    initial: dict[str, str]
    trailing: dict[str, str]


class NodeRpc:
    """One RPC; requests are messages in JSON's form. What `options` there are, the script says."""

    def __init__(self, target: str, method: str, *requests: Any, **options: Any) -> None:
        asked = {
            "target": target,
            "proto": str(PROTO),
            "method": method,
            "requests": requests,
            **options,
        }
        self._process = subprocess.Popen(
            ["node", str(FOLDER / "client.js")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._say(json.dumps(asked))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def cancel(self) -> None:
        """Have it leave."""
        self._say("cancel")

    def outcome(self) -> Outcome:
        """Wait for the end."""
        found, errors = self._process.communicate(timeout=WAIT_SECS)
        assert found, errors
        return Outcome(**json.loads(found))

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def call(target: str, method: str, *requests: Any, **options: Any) -> Outcome:
    """Run an RPC to its end."""
    with NodeRpc(target, method, *requests, **options) as rpc:
        return rpc.outcome()
