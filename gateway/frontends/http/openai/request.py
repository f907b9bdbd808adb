"""Requests to OpenAI's endpoints: bodies, ids, and the models that they name.

A body is parsed once: the gateway reads some members, and a model in this process may take all. Its
bytes are unchanged.
"""

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.types import Scope

from gateway.config import ModelConfig
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.body import (
    IDENTITY,
    SUPPORTED,
    WINDOW_BITS,
    decoded,
    read_body,
    read_compressed,
)
from gateway.frontends.http.errors import JSON, openai_refusal
from gateway.frontends.http.json_layout import scan
from gateway.frontends.http.json_object import MEMBER_DEPTH
from gateway.frontends.http.large_json import (
    SLICED_BYTES,
    LargeArray,
    LargeText,
    Where,
    plain,
)
from gateway.frontends.http.request_scope import caller_in
from gateway.models.model import Model
from gateway.observability.receipt import TIMING
from gateway.openai_contract import (
    ENDPOINT,
    REQUEST,
    RESPONSE,
    Endpoint,
    RequestBody,
    declares_endpoint,
    serves_openai,
)
from gateway.policy.caller import Caller, sees
from gateway.tensor import Buffer
from gateway.text_encoder import encoder_of
from gateway.threads import Threads

STREAMING = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES})
"""Endpoints that can stream; others ignore the member `stream`."""

NVEXT, EXTRA_FIELDS = "nvext", "extra_fields"
"""The member of Dynamo's requests, and the list in it, which names further members of answers."""

COUNTED_BYTES = 1 << 20
INPUT = "input"
"""The member that embeddings need; only the model reads other large members."""

MAX_PARTS = 1 << 18
"""Opening brackets of a body, those in texts too. Parsing more blocks the server for seconds."""

MAX_SHOWN = 40
"""Characters of an invalid value that an error repeats."""

HEADER = "X-Request-Id"
KEY = "sluice.request_id"
"""The key of the id in a request's scope, once it is known."""


@dataclass(frozen=True, slots=True)
class OpenAiRequest:
    """One request: its body, the parsed members, its `model` ("" without one), and `stream`.

    The model may take and change the members, unless the body is larger than SLICED_BYTES.
    `received_ns` is the time at which it arrived (`time.perf_counter_ns`), `whole_ns` that at which
    its body was complete. It `wants_timing` if a member asks for its receipt.
    """

    endpoint: Endpoint
    received_ns: int
    whole_ns: int
    body: RequestBody
    members: Mapping[str, Any]
    model: str
    stream: bool
    wants_timing: bool = False


async def read_request(
    request: Request, endpoint: Endpoint, limit: int, threads: Threads
) -> OpenAiRequest:
    """The request; INVALID_ARG unless its body is declared as JSON, small enough, and an object.

    Of members with one name the last counts, as in the models that parse the body.
    """
    received_ns = time.perf_counter_ns()
    _check_type(request)
    body = await _read(request, limit, threads)
    times = received_ns, time.perf_counter_ns()
    return await decoded(threads, request.scope, partial(_parsed, endpoint, times), body)


def _parsed(endpoint: Endpoint, times: tuple[int, int], body: Buffer) -> OpenAiRequest:
    text = bytes(body)
    members = _parse(text)
    # Of a larger text not all members are parsed.
    whole = RequestBody(text, members if len(text) <= SLICED_BYTES else None)
    return OpenAiRequest(
        *(endpoint, *times, whole, members, _model(members), _stream(members, endpoint)),
        wants_timing=_wants_timing(members),
    )


def _check_type(request: Request) -> None:
    """Require JSON, as vLLM: a browser sends other types cross-origin without a preflight."""
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
    return await read_compressed(request.receive, encoding, limit, threads)


def _parse(body: bytes) -> dict[str, Any]:
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
    """The members of a large body; of large arrays only `input` is converted to a list."""
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
        raise openai_refusal(
            Code.INVALID_ARG, "`model` is no text, expected a model's name", "model"
        )
    return found or ""


def _stream(members: Mapping[str, Any], endpoint: Endpoint) -> bool:
    found = members.get("stream")
    if endpoint not in STREAMING or found is None:
        return False
    if not isinstance(found, bool):
        raise openai_refusal(
            Code.INVALID_ARG, f"`stream` is {_shown(found)}, expected true or false", "stream"
        )
    return found


def _wants_timing(members: Mapping[str, Any]) -> bool:
    if members.get(TIMING) is True:
        return True
    extension = members.get(NVEXT)
    fields = extension.get(EXTRA_FIELDS) if isinstance(extension, dict) else None
    return isinstance(fields, list) and TIMING in fields


def _shown(value: Any) -> str:
    """The JSON of a value, shortened."""
    return orjson.dumps(value).decode()[:MAX_SHOWN]


def _invalid(message: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, message)


def request_id(request: Request) -> str:
    """The id in the client's header, or a new one."""
    found: str | None = request.scope.get(KEY)
    if found is None:
        found = request.scope[KEY] = request.headers.get(HEADER) or uuid.uuid4().hex
    return found


def own_id(request: Request, members: Mapping[str, Any]) -> str:
    """The id of a request: that of its header, of its body, or a new one.

    An answer's header never has the body's id, since a text may not fit into a header.
    """
    named = members.get("request_id")
    if HEADER in request.headers or not (isinstance(named, str) and named):
        return request_id(request)
    return named


def request_id_header(request: Request) -> dict[str, str]:
    """The header of every answer."""
    return {HEADER: request_id(request)}


class ServedModels:
    """The models that serve OpenAI's endpoints for a caller, by their own and further names."""

    def __init__(self, dataplane: DataPlane, caller: Caller | None = None) -> None:
        self._dataplane = dataplane
        self._caller = caller

    def of(self, scope: Scope) -> "ServedModels":
        """The models of the caller of a request."""
        caller = caller_in(scope)
        return self if caller is None else ServedModels(self._dataplane, caller)

    def __iter__(self) -> Iterator[Model]:
        """Each ready model that serves any endpoint, in its highest version, by name."""
        ready = {model.name: model for model in self._loaded() if model.ready}
        return (model for model in ready.values() if any(serves(model.config, e) for e in Endpoint))

    def _loaded(self) -> Iterator[Model]:
        return (each for each in self._dataplane.models() if sees(self._caller, each.name))

    def find(self, name: str, endpoint: Endpoint) -> Model:
        """The model with that name; for "" the only one that serves the endpoint.

        NOT_FOUND if there is none, UNAVAILABLE while it is being loaded, INVALID_ARG if it does
        not serve the endpoint.
        """
        model = self._named(name) if name else self._only(endpoint)
        if not serves(model.config, endpoint):
            raise _unfit(name, model.config, endpoint)
        return model

    def labelled(self, name: str) -> Model | None:
        """The version that a name means by its label, if it is ready and serves any endpoint."""
        if self._dataplane.address(name, caller=self._caller)[0] == name:
            return None
        model = self._named(name)
        return model if model.ready and any(serves(model.config, e) for e in Endpoint) else None

    def why_not(self, name: str) -> InferenceError:
        """The error for a name that is unknown, serves no endpoint, or is not ready."""
        try:
            model = self._named(name)
        except InferenceError as error:
            return error
        if not any(serves(model.config, endpoint) for endpoint in Endpoint):
            return _unknown(name)
        return InferenceError(
            Code.UNAVAILABLE, f"model '{model.name}' is unavailable: {model.trouble}"
        )

    def _named(self, name: str) -> Model:
        try:
            return self._dataplane.model(name, caller=self._caller)
        except InferenceError as error:
            if error.code is Code.INVALID_ARG:
                raise
            if (found := self._further_named(name)) is not None:
                return found
            if error.code is not Code.NOT_FOUND:
                raise
        raise _unknown(name)

    def _further_named(self, name: str) -> Model | None:
        for model in self._loaded():
            if name in model.further_names:
                return self._dataplane.model(model.name)
        return None

    def _only(self, endpoint: Endpoint) -> Model:
        found = [model for model in self if serves(model.config, endpoint)]
        if not found:
            # A model that restarts is named all the same; its request gets the reason.
            down = {model.name: model for model in self._loaded()}
            found = [model for model in down.values() if serves(model.config, endpoint)]
        if len(found) != 1:
            names = ", ".join(model.name for model in found) or "none"
            raise openai_refusal(
                Code.INVALID_ARG,
                f"`model` is missing, expected the name of a model that serves {endpoint}: {names}",
                "model",
            )
        return found[0]


def serves(config: ModelConfig, endpoint: Endpoint) -> bool:
    """Whether a model with this config serves an endpoint."""
    if serves_openai(config):
        return endpoint is Endpoint.CHAT or declares_endpoint(config)
    return endpoint is Endpoint.EMBEDDINGS and encoder_of(config) is not None


def _unknown(name: str) -> InferenceError:
    return openai_refusal(Code.NOT_FOUND, f"The model `{name}` does not exist.", "model")


def _unfit(name: str, config: ModelConfig, endpoint: Endpoint) -> InferenceError:
    lacks = f"it lacks the input '{REQUEST}' or the output '{RESPONSE}'"
    if serves_openai(config):
        lacks = f"it lacks the input '{ENDPOINT}'"
    elif endpoint is Endpoint.EMBEDDINGS:
        lacks += (
            ", and does not have exactly one required input, BYTES with one element, and exactly "
            "one output that is a vector of FP32 of a fixed size"
        )
    return openai_refusal(
        Code.INVALID_ARG, f"The model `{name}` does not serve {endpoint}: {lacks}", "model"
    )
