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
from gateway.frontends.http.body import collect, decoded, read_body
from gateway.frontends.http.compression import (
    IDENTITY,
    SUPPORTED,
    WINDOW_BITS,
    decompress,
    most_compressed,
    too_large,
)
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.json_layout import scan
from gateway.frontends.http.json_object import MEMBER_DEPTH
from gateway.frontends.http.large_json import (
    SLICED_BYTES,
    LargeArray,
    LargeText,
    Where,
    plain,
)
from gateway.frontends.http.openai.errors import refusal
from gateway.openai_exchange import Endpoint
from gateway.tensor import Buffer
from gateway.threads import Threads

STREAMING = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES})
"""What may be answered piece by piece; elsewhere `stream` means nothing."""


COUNTED_BYTES = 1 << 20
INPUT = "input"
"""The member that embeddings read here; of all other large ones the model reads its own copy."""

MAX_PARTS = 1 << 18
"""Opening brackets of a body, those in texts too. With more, reading it takes a second or several,
in which nobody else is served."""


MAX_SHOWN = 40
"""Characters of a wrong value that an error repeats."""


@dataclass(frozen=True, slots=True)
class OpenAiCall:
    """One request: its bytes, their members, the model they name ("" if none), if it streams.

    `received_ns` is when it came (`time.perf_counter_ns`).
    """

    endpoint: Endpoint
    received_ns: int
    body: bytes
    members: Mapping[str, Any]
    model: str
    stream: bool


async def read_call(
    request: Request, endpoint: Endpoint, limit: int, threads: Threads
) -> OpenAiCall:
    """The request; INVALID_ARG if its body is not declared as JSON, too large, no object, or wrong.

    Of members with one name the last counts, as for the models that read the body themselves.
    """
    received_ns = time.perf_counter_ns()
    _check_type(request)
    body = await _read(request, limit, threads)
    return await decoded(threads, request.scope, partial(_call, endpoint, received_ns), body)


def _call(endpoint: Endpoint, received_ns: int, body: Buffer) -> OpenAiCall:
    body = bytes(body)
    members = _parse(body)
    return OpenAiCall(
        endpoint, received_ns, body, members, _model(members), _stream(members, endpoint)
    )


def _check_type(request: Request) -> None:
    """As vLLM: a page of another origin can send any other type without asking its browser."""
    found = request.headers.get("content-type", "")
    if found.partition(";")[0].strip().lower() != JSON:
        raise _invalid(
            f"Unsupported Media Type: Only '{JSON}' is allowed, found content-type "
            f"'{found[:MAX_SHOWN]}'"
        )


async def _read(request: Request, limit: int, threads: Threads) -> bytes | bytearray:
    encoding = request.headers.get("content-encoding", IDENTITY)
    if encoding in ("", IDENTITY):
        return await read_body(request, limit)
    if encoding not in WINDOW_BITS:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"the body's content-encoding is '{encoding}', expected one of {SUPPORTED}, or none",
        )
    compressed = await collect(request.receive, partial(_check_compressed, limit))
    return await decompress(encoding, compressed, limit, threads)


def _check_compressed(limit: int, size: int) -> None:
    if size > most_compressed(limit):
        raise too_large(limit)


def _parse(body: bytes) -> Mapping[str, Any]:
    if not body.strip():
        raise _invalid("the body is empty, expected a JSON object")
    parts = _count_parts(body)
    if parts > MAX_PARTS:
        raise _invalid(f"the body has {parts} objects and lists, expected at most {MAX_PARTS}")
    found = _parse_large(body) if len(body) > SLICED_BYTES else _loads(body)
    if not isinstance(found, dict):
        raise _invalid("the body is JSON, but an object is expected in it")
    return found


def _count_parts(body: bytes) -> int:
    steps = range(0, len(body), COUNTED_BYTES)
    return sum(
        body.count(bracket, at, at + COUNTED_BYTES) for at in steps for bracket in (b"{", b"[")
    )


def _loads(body: bytes, where: Where = int) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        place = f"{error.msg}: character {where(error.pos)}"
        raise _invalid(f"the body is not valid JSON: {place}") from None


def _parse_large(body: bytes) -> Any:
    """Its members, of which only those have their values that are read here."""
    layout = scan(memoryview(body), depth=MEMBER_DEPTH, nested=False)
    found = LargeText(memoryview(body), layout, _loads, dict.__setitem__).parsed(_loads)
    if not isinstance(found, dict):
        return found
    for key, value in found.items():
        if isinstance(value, LargeArray) and key != INPUT:
            value.check()
    return {
        key: value if isinstance(value, LargeArray) and key != INPUT else plain(value)
        for key, value in found.items()
    }


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
    return orjson.dumps(value).decode()[:MAX_SHOWN]


def _invalid(message: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, message)
