"""API keys of clients, the key file of a server, and refusals as clients see them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx

from gateway.policy.key_file import text_of_key
from gateway.policy.keys import ApiKey
from gateway.policy.watched_file import LOOK_SECS
from tests.serving import WAIT_SECS

NOTICED_SECS = LOOK_SECS + 1.0
"""A changed key file holds after this time."""

INFER = "/v2/models/single/infer"
ECHO = {"inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]}


def stored(made: tuple[str, str, bytes], tenant: str = "team", **fields: Any) -> str:
    """The part of a key file for a key that `new_key` has made."""
    _, key_id, digest = made
    return text_of_key(ApiKey(key_id, digest, tenant, **fields))


def write(file: Path, *texts: str, mode: int = 0o600) -> None:
    """Replace a file by another one, as an editor or an orchestrator does."""
    new = file.with_suffix(".new")
    new.write_text("\n".join(texts))
    new.chmod(mode)
    new.replace(file)


def bearer(key: str) -> dict[str, str]:
    """The header with a key."""
    return {"Authorization": f"Bearer {key}"}


def message_of(answer: httpx.Response) -> str:
    """The text of an error, in OpenAI's form or in that of v2."""
    error = answer.json()["error"]
    text: str = error["message"] if isinstance(error, dict) else error
    return text


def status_of(channel: Any, path: str, metadata: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The status of an RPC with an empty message, and its text."""
    rpc = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=WAIT_SECS)
    try:
        next(iter(rpc), None)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    rpc.cancel()
    return "OK", ""
