"""The body of one of OpenAI's requests: read once, and looked at only for what the door must know.

All else in it is the model's business, which gets the bytes as they came.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request

from gateway.errors import Code, InferenceError
from gateway.frontends.http.body import collect, read_body
from gateway.frontends.http.compression import (
    IDENTITY,
    SUPPORTED,
    WINDOW_BITS,
    decompress,
    most_compressed,
    too_large,
)
from gateway.frontends.http.openai.errors import refusal
from gateway.openai_exchange import Endpoint

STREAMING = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES})
"""What may be answered piece by piece; elsewhere `stream` means nothing."""


MAX_PARTS = 1 << 18
"""Opening brackets of a body, those in texts too. With more, reading it takes a second or several,
in which nobody else is served."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: its bytes, their members, the model they name ("" if none), if it streams.

    `received_ns` is when it came (`time.perf_counter_ns`).
    """

    endpoint: Endpoint
    received_ns: int
    body: bytes
    members: Mapping[str, Any]
    model: str
    stream: bool


async def read_call(request: Request, endpoint: Endpoint, limit: int) -> Call:
    """The request; INVALID_ARG if its body is too large, no JSON object, or has wrong members.

    Of members with one name the last counts, as for the models that read the body themselves.
    """
    received_ns = time.perf_counter_ns()
    body = await _read(request, limit)
    members = _parse(body)
    return Call(endpoint, received_ns, body, members, _model(members), _stream(members, endpoint))


async def _read(request: Request, limit: int) -> bytes:
    encoding = request.headers.get("content-encoding", IDENTITY)
    if encoding in ("", IDENTITY):
        return await read_body(request, limit)
    if encoding not in WINDOW_BITS:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"the body's content-encoding is '{encoding}', expected one of {SUPPORTED}, or none",
        )
    compressed = await collect(request.receive, partial(_check_compressed, limit))
    return await decompress(encoding, compressed, limit)


def _check_compressed(limit: int, size: int) -> None:
    if size > most_compressed(limit):
        raise too_large(limit)


def _parse(body: bytes) -> Mapping[str, Any]:
    if not body.strip():
        raise _invalid("the body is empty, expected a JSON object")
    parts = body.count(b"{") + body.count(b"[")
    if parts > MAX_PARTS:
        raise _invalid(f"the body has {parts} objects and lists, expected at most {MAX_PARTS}")
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise _invalid("the body is JSON, but an object is expected in it")
    return found


def _model(members: Mapping[str, Any]) -> str:
    found = members.get("model")
    if not isinstance(found, str | None):
        raise refusal(Code.INVALID_ARG, "`model` is no text, expected a model's name", "model")
    return found or ""


def _stream(members: Mapping[str, Any], endpoint: Endpoint) -> bool:
    found = members.get("stream")
    if endpoint not in STREAMING or found is None:
        return False
    if not isinstance(found, bool):
        raise refusal(
            Code.INVALID_ARG, f"`stream` is {_shown(found)}, expected true or false", "stream"
        )
    return found


def _shown(value: Any) -> str:
    """A value of JSON as it is written there; of a long one the beginning."""
    return orjson.dumps(value).decode()[:40]


def _invalid(message: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, message)
