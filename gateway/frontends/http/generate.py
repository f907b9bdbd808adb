"""Routes of the generate extension: JSON in, one JSON object or server-sent events out."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from gateway.admission.deadlines import TIMES, deadline_of, read_wishes
from gateway.dataplane import DataPlane
from gateway.errors import AnsweredError, Code, InferenceError
from gateway.frontends.http.body import decoded, read_body
from gateway.frontends.http.errors import JSON, error_body
from gateway.frontends.http.generate_codec import (
    GenerateEncoder,
    decode_generate,
    refuse_repeated_inputs,
)
from gateway.frontends.http.head import check_head
from gateway.frontends.http.json_object import parse_generate
from gateway.frontends.http.json_tensors import is_large
from gateway.frontends.http.request_scope import (
    LAST_EVENT_ID,
    MODEL,
    VERSION,
    OnDisconnect,
    addressed,
    begin_trace,
    caller_in,
    key_of,
    replay_headers,
    resumed,
)
from gateway.frontends.http.rollout_keys import keyed
from gateway.frontends.http.sse import (
    First,
    GenerateEvents,
    PendingEvents,
    first_status,
    refused_stream,
)
from gateway.frontends.http.timing import (
    RECEIPT,
    WISH,
    begin_receipt,
    timed,
    with_timing,
)
from gateway.messages import InferRequest, InferResponse
from gateway.models.model import Model
from gateway.observability.receipt import Receipt, receipt_of
from gateway.resumption.reader import RecordingReader, Responses
from gateway.resumption.recording import RESUMABLE, Key, RecordedRequest, without_resumable
from gateway.resumption.recordings import Recordings
from gateway.settings import HttpSettings
from gateway.stream import INTERRUPTED, Interrupted, ResponseStream, has_data
from gateway.tensor import Buffer

STREAMING = "_stream"
"""The end of the path of a request for a stream."""
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)


class _Call(NamedTuple):
    """One request after reading."""

    model: Model
    request: InferRequest
    key: Key | None
    resumable: bool
    whole_ns: int

    @property
    def recorded(self) -> bool:
        """Whether its stream is recorded."""
        return self.resumable or self.key is not None


class GenerateRoutes:
    """`POST /v2/models/{model}[/versions/{version}]/generate` and `generate_stream`.

    A stream is resumed under its own path, by POST or by GET.
    """

    def __init__(
        self, dataplane: DataPlane, settings: HttpSettings, recordings: Recordings | None = None
    ) -> None:
        self._dataplane = dataplane
        self._settings = settings
        self._recordings = recordings or Recordings()

    def routes(self) -> list[Route]:
        """The routes, with and without a version."""
        return [
            Route(f"{path}/{name}", endpoint, methods=methods)
            for path in (MODEL, VERSION)
            for name, endpoint, methods in (
                ("generate", self.generate, ["POST"]),
                ("generate_stream", self.generate_stream, ["POST", "GET"]),
            )
        ]

    async def generate(self, request: Request) -> Response:
        """Answer with exactly one JSON object."""
        call = await self._read(request)
        if call.resumable:
            raise _not_a_stream()
        stream = (
            await self._recorded(request, call) if call.recorded else self._infer(request, call)
        )
        with stream, OnDisconnect(request.scope, stream.cancel):
            found = await _first_two(stream)
        # As on Triton the first response alone decides the status.
        status = first_status(found)
        encode = _encoder(stream, call).encode
        if len(found) != 1:
            body = error_body(NOT_ONE)
        elif is_large(found[0].outputs):
            body = await self._dataplane.threads.run(encode, found[0])
        else:
            body = encode(found[0])
        headers = {**replay_headers(stream), **self._dataplane.limits(caller_in(request.scope))}
        answer = Response(body, status, headers, media_type=JSON)
        receipt = receipt_of(call.request)
        return answer if receipt is None else timed(answer, receipt)

    async def generate_stream(self, request: Request) -> Response:
        """Answer with one event per response.

        An error in place of the first response is an event too, and decides the status. A request
        that is refused before it is queued gets a JSON error (generate extension).
        """
        if request.headers.get(LAST_EVENT_ID) and request.method in ("GET", "POST"):
            return await self._resume(request)
        if request.method != "POST":
            raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})
        call = await self._read(request)
        stream = (
            await self._recorded(request, call) if call.recorded else self._infer(request, call)
        )
        receipt = receipt_of(call.request)
        encoder = _encoder(stream, call)
        if receipt is not None and receipt.asked:
            encoder = _TimedEncoder(stream, call, receipt)
        begin = partial(self._streamed, stream, encoder, receipt=receipt)
        return self._pending(request, stream, begin)

    async def _resume(self, request: Request) -> Response:
        await read_body(request, self._settings.max_input_size)
        reader = await resumed(self._recordings, request.scope)
        return self._pending(request, reader, partial(self._resumed, reader))

    def _resumed(self, reader: RecordingReader, first: First) -> Response:
        if first is not None and reader.finished and not any(map(has_data, first)):
            # A client that gets 204 does not reconnect (server-sent events, 9.2.2).
            return Response(status_code=HTTPStatus.NO_CONTENT)
        asked = reader.recorded
        encoder = GenerateEncoder(asked.request.model, asked.model.version, asked.request.id)
        return self._streamed(reader, encoder, first)

    def _pending(
        self, request: Request, stream: Responses, begin: Callable[[First], Response]
    ) -> Response:
        caller, path = caller_in(request.scope), request.scope["path"]
        receipt: Receipt | None = request.scope.get(RECEIPT)

        def begin_limited(first: First) -> Response:
            response = begin(first)
            response.headers.update(self._dataplane.limits(caller))
            return response

        def refuse(error: InferenceError) -> Response:
            answer = refused_stream(path, error)
            return answer if receipt is None else timed(answer, receipt)

        return PendingEvents(stream, self._settings.first_response_secs, begin_limited, refuse)

    def _streamed(
        self,
        stream: Responses,
        encoder: GenerateEncoder,
        first: First,
        receipt: Receipt | None = None,
    ) -> Response:
        threads = self._dataplane.threads
        events = GenerateEvents(stream, first, encoder, self._settings, threads)
        events.receipt = receipt
        return events

    def _infer(self, request: Request, call: _Call) -> ResponseStream:
        trace = begin_trace(request.scope, self._dataplane.tracer, call.request, call.whole_ns)
        asked, chooser = call.request, call.model.chooser
        if chooser is not None:
            asked = keyed(asked, chooser, request.scope)
        return self._dataplane.infer(asked, trace=trace)

    async def _recorded(self, request: Request, call: _Call) -> RecordingReader:
        """The request, or the earlier one with its idempotency key."""
        asked = RecordedRequest(request.scope["path"], call.model, call.request, call.key)
        return await self._recordings.open_anywhere(asked, partial(self._infer, request, call))

    async def _read(self, request: Request) -> _Call:
        received_ns = time.perf_counter_ns()
        name, version = addressed(request, self._dataplane)
        caller = caller_in(request.scope)
        model = self._dataplane.model(name, version, caller)
        _refuse_encoding(request)
        if self._dataplane.admission is not None:
            check_head(self._dataplane, request.scope, model)
        body = await read_body(request, self._settings.max_input_size)
        whole_ns = time.perf_counter_ns()
        read = partial(_call, request.scope, model, version, (received_ns, whole_ns))
        call = await decoded(self._dataplane.threads, request.scope, read, body)
        receipts, asked = self._dataplane.receipts, call.request
        if not (asked.parameters or receipts.every or WISH in request.scope["headers"]):
            return call
        return call._replace(request=begin_receipt(request.scope, receipts, asked, whole_ns))


def _call(scope: Scope, model: Model, version: str, times: tuple[int, int], body: Buffer) -> _Call:
    received_ns, whole_ns = times
    members = parse_generate(body)
    refuse_repeated_inputs(body, members, model.config)
    caller = caller_in(scope)
    asked = decode_generate(members, model.config, version, received_ns, caller)
    if not TIMES.isdisjoint(dict(scope["headers"])):
        found = read_wishes(scope["headers"], streams=scope["path"].endswith(STREAMING))
        asked = replace(asked, deadline=deadline_of(found, received_ns))
    wanted, resumable = without_resumable(asked)
    return _Call(model, wanted, key_of(scope, body), resumable, whole_ns)


def _encoder(stream: Responses, call: _Call) -> GenerateEncoder:
    return GenerateEncoder(call.request.model, stream.model.version, call.request.id)


class _TimedEncoder(GenerateEncoder):
    """Encodes responses with the receipt of their request in the last one."""

    def __init__(self, stream: Responses, call: _Call, receipt: Receipt) -> None:
        super().__init__(call.request.model, stream.model.version, call.request.id)
        self._receipt = receipt

    def encode(self, response: InferResponse) -> bytes:
        found = super().encode(response)
        is_last = response.final and response.error is None
        return with_timing(found, self._receipt) if is_last else found

    def encode_text(self, response: InferResponse) -> bytes | None:
        return None if response.final else super().encode_text(response)


def _not_a_stream() -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"parameter '{RESUMABLE}' is for generate_stream; a repeated generate request with the "
        "same Idempotency-Key gets the first one's answer",
    )


async def _first_two(stream: Responses) -> list[InferResponse]:
    """The first two responses with data, or errors of the model.

    Raises Interrupted if the request was interrupted, and an error that is the only answer.
    """
    found: list[InferResponse] = []
    try:
        while len(found) < 2 and (batch := await stream.batch()):
            if batch[-1] == INTERRUPTED:
                raise Interrupted
            found += [response for response in batch if has_data(response)]
    except AnsweredError as error:
        if not found:
            raise
        found.append(InferResponse(error=error))
    return found


def _refuse_encoding(request: Request) -> None:
    if request.headers.get("content-encoding", "identity") not in ("", "identity"):
        raise InferenceError(
            Code.INVALID_ARG, "Unsupported content-encoding, only 'identity' is supported."
        )
