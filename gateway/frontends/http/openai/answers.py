"""Answers of OpenAI's endpoints: whole, as streams of chunks, or as errors."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.deadlines import TIMES, deadline_of, read_wishes
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.body import read_body
from gateway.frontends.http.errors import (
    JSON,
    RETRY_AFTER_SECS,
    SHOULD_RETRY,
    error_headers,
    json_answer,
    log_refusal,
    openai_form,
)
from gateway.frontends.http.head import check_head
from gateway.frontends.http.openai.embeddings import EmbeddingAnswers
from gateway.frontends.http.openai.request import (
    STREAMING,
    OpenAiRequest,
    ServedModels,
    own_id,
    read_request,
    request_id_header,
)
from gateway.frontends.http.request_scope import (
    LAST_EVENT_ID,
    OnDisconnect,
    begin_trace,
    caller_in,
    id_line,
    key_of,
    replay_headers,
    resumed,
)
from gateway.frontends.http.rollout_keys import keyed, version_header
from gateway.frontends.http.sse import EncodeText, EventStream, First, PendingEvents, event
from gateway.frontends.http.timing import (
    RECEIPT,
    WISH,
    begin_receipt,
    timed,
    timing_comment,
    with_timing,
)
from gateway.messages import InferRequest, InferResponse
from gateway.models.model import Model
from gateway.observability.gen_ai import request_attributes
from gateway.observability.receipt import Receipt
from gateway.openai_contract import (
    EVENT,
    RESPONSE,
    Endpoint,
    RequestBody,
    request_tensors,
    serves_openai,
)
from gateway.resumption.reader import EventId, RecordingReader, Responses
from gateway.resumption.recording import RecordedRequest
from gateway.resumption.recordings import Recordings
from gateway.settings import HttpSettings
from gateway.stream import INTERRUPTED, Interrupted, ResponseStream
from gateway.tensor import Datatype, Tensor

DONE = event(b"[DONE]")
NO_CHOICES = b'{"choices":[]}'
"""A chunk as that of the usage."""
LINE_END = re.compile(rb"[\n\r]")
SERVICE_UNAVAILABLE = 503

Answer = Callable[[Request], Awaitable[Response]]


class ChunkEncoder:
    """Encodes the responses of one request: the model's bytes, framed as events."""

    def __init__(self, model: str, endpoint: Endpoint) -> None:
        self._model = model
        self._named = endpoint is Endpoint.RESPONSES

    @property
    def end(self) -> bytes:
        """The event behind the last one; streams of named events have none."""
        return b"" if self._named else DONE

    def receipt_event(self, receipt: Receipt) -> bytes:
        """A chunk with the receipt alone; a comment where events are named."""
        if self._named:
            return timing_comment(receipt)
        return event(with_timing(NO_CHOICES, receipt))

    def whole(self, response: InferResponse) -> bytes:
        """The JSON in a response; INTERNAL unless it is exactly one element."""
        output = response.output(RESPONSE)
        elements = () if output is None else output.elements()
        if len(elements) != 1:
            raise InferenceError(
                Code.INTERNAL,
                f"model '{self._model}' answered with {len(elements)} elements in '{RESPONSE}', "
                "expected 1",
            )
        return elements[0]

    def events(self, responses: Sequence[InferResponse]) -> bytes:
        """An event for each response with data, each error, and one for an interruption."""
        found: list[bytes] = []
        for response in responses:
            outputs = response.outputs
            if len(outputs) == 1 and not response.parameters and outputs[0].name == RESPONSE:
                data = outputs[0].data
                chunk = data[0] if type(data) is tuple and len(data) == 1 else b"\n"
                if b"\n" not in chunk and b"\r" not in chunk:
                    found += (b"data: ", chunk, b"\n\n")  # most chunks, without further calls
                    continue
            found.append(self._event(response))
        return b"".join(found)

    def text_event(self, name: str, chunk: bytes) -> bytes | None:
        """The event of a response with one element; None for one that takes several lines."""
        if name != RESPONSE or b"\n" in chunk or b"\r" in chunk:
            return None
        return b"data: %b\n\n" % chunk

    def numbered_events(self, responses: Iterable[tuple[EventId, InferResponse]]) -> bytes:
        """The same events with their ids."""
        return b"".join(
            [(id_line(e) if found.outputs else b"") + self._event(found) for e, found in responses]
        )

    def failure(self, error: InferenceError) -> bytes:
        """The event for an error that ends the stream."""
        _, body = openai_form(error)
        return (b"event: error\n" if self._named else b"") + event(body)

    def _event(self, response: InferResponse) -> bytes:
        if response.outputs:
            return self._chunk(response)
        if response.error is not None:
            return self.failure(response.error)
        # Without an event the answer would look complete.
        return self.failure(Interrupted()) if response == INTERRUPTED else b""

    def _chunk(self, response: InferResponse) -> bytes:
        chunk = self.whole(response)
        if LINE_END.search(chunk):
            # A field of an event is one line; the client joins the lines again.
            chunk = b"\ndata: ".join(chunk.splitlines())
        name = response.parameters.get(EVENT) if response.parameters else None
        return event(chunk) if name is None else b"event: %b\n" % str(name).encode() + event(chunk)


class TimedChunkEncoder(ChunkEncoder):
    """Encodes responses with the receipt of their request in the last chunk."""

    def __init__(self, model: str, endpoint: Endpoint, receipt: Receipt) -> None:
        super().__init__(model, endpoint)
        self._receipt = receipt

    def events(self, responses: Sequence[InferResponse]) -> bytes:
        return super().events([*map(self._timed, responses)])

    def numbered_events(self, responses: Iterable[tuple[EventId, InferResponse]]) -> bytes:
        return super().numbered_events([(each, self._timed(found)) for each, found in responses])

    def _timed(self, response: InferResponse) -> InferResponse:
        if not (response.final and response.outputs):
            return response
        chunk = with_timing(self.whole(response), self._receipt)
        return replace(response, outputs=(Tensor(RESPONSE, Datatype.BYTES, (1,), (chunk,)),))


class OpenAiEvents(EventStream):
    """The events of one request; an error is the last one before `[DONE]`."""

    def __init__(
        self,
        stream: Responses,
        first: First,
        encoder: ChunkEncoder,
        settings: HttpSettings,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(stream, first, settings, headers)
        self._encoder = encoder

    def encode_batch(self, batch: Sequence[InferResponse]) -> bytes:
        if isinstance(self._stream, RecordingReader):
            return self._encoder.numbered_events(self._stream.numbered(batch))
        return self._encoder.events(batch)

    @property
    def text_encoder(self) -> EncodeText:
        return self._encoder.text_event

    def encode_failure(self, error: InferenceError) -> bytes:
        return self._encoder.failure(error)

    def encode_end(self) -> bytes:
        return self._encoder.end

    def encode_receipt(self, receipt: Receipt) -> bytes:
        if receipt.asked and not (receipt.told or receipt.failure):
            return self._encoder.receipt_event(receipt)
        return super().encode_receipt(receipt)


class OpenAiAnswers:
    """Answers OpenAI's requests by models that have the contract of `openai_contract`.

    A request with an idempotency key is recorded: a repeated one gets the same answer, and an
    interrupted stream can be resumed.
    """

    def __init__(
        self, dataplane: DataPlane, settings: HttpSettings, recordings: Recordings
    ) -> None:
        self._dataplane = dataplane
        self._settings = settings
        self._recordings = recordings
        self._models = ServedModels(dataplane)
        self._embeddings = EmbeddingAnswers(dataplane)

    def of(self, endpoint: Endpoint) -> Answer:
        """The function that answers requests to an endpoint."""

        async def answer(request: Request) -> Response:
            return await self._answer(request, endpoint)

        return answer

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        """Answer one request; InferenceError if it fails before any part of the answer."""
        if endpoint in STREAMING and request.headers.get(LAST_EVENT_ID):
            return await self._resume(request, endpoint)
        if self._dataplane.admission is not None:
            check_head(self._dataplane, request.scope)
        call = await read_request(
            request, endpoint, self._settings.max_input_size, self._dataplane.threads
        )
        model = self._models.of(request.scope).find(call.model, endpoint)
        # Without the contract a model serves no other endpoint.
        if endpoint is Endpoint.EMBEDDINGS and not serves_openai(model.config):
            return await self._embeddings.answer(request, call, model)
        responses = await self._infer(request, call, model)
        encoder = ChunkEncoder(model.name, endpoint)
        receipt: Receipt | None = request.scope.get(RECEIPT)
        if call.stream:
            if receipt is not None and receipt.asked:
                encoder = TimedChunkEncoder(model.name, endpoint, receipt)
            return self._stream(request, responses, encoder, call.body)
        try:
            with responses, OnDisconnect(request.scope, responses.cancel):
                body = encoder.whole(await responses.only())
        finally:
            # The model has taken the members, or parses the text: do not keep both.
            call.body.take()
        headers = {**self._headers(request, responses), **replay_headers(responses)}
        answer = Response(body, headers=headers, media_type=JSON)
        return answer if receipt is None else timed(answer, receipt)

    async def _resume(self, request: Request, endpoint: Endpoint) -> Response:
        """The stream behind the last chunk that the client has received; the body is ignored."""
        await read_body(request, self._settings.max_input_size)
        reader = await resumed(self._recordings, request.scope)
        encoder = ChunkEncoder(reader.recorded.request.model, endpoint)
        return self._stream(request, reader, encoder)

    def _stream(
        self,
        request: Request,
        responses: Responses,
        encoder: ChunkEncoder,
        body: RequestBody | None = None,
    ) -> Response:
        """A chunk for each response; an error before the first one decides the status."""
        headers, path = self._headers(request, responses), request.scope["path"]
        receipt: Receipt | None = request.scope.get(RECEIPT)

        def begin(first: First) -> Response:
            if body is not None:
                body.take()  # as in `_answer`
            events = OpenAiEvents(responses, first, encoder, self._settings, headers)
            events.receipt = receipt
            return events

        def refuse(error: InferenceError) -> Response:
            answer = _refused(path, headers, error)
            return answer if receipt is None else timed(answer, receipt)

        return PendingEvents(responses, self._settings.first_response_secs, begin, refuse)

    def _headers(self, request: Request, responses: Responses) -> Mapping[str, str]:
        headers, model = request_id_header(request), responses.model
        headers = {**headers, **self._dataplane.limits(caller_in(request.scope))}
        if model is not None and model.chooser is not None:
            return {**headers, **version_header(model)}
        return headers

    async def _infer(self, request: Request, call: OpenAiRequest, model: Model) -> Responses:
        caller = caller_in(request.scope)
        wishes = None
        if not TIMES.isdisjoint(dict(request.scope["headers"])):
            wishes = read_wishes(request.scope["headers"], streams=call.stream)
        infer_request = InferRequest(
            model=model.name,
            version=self._dataplane.address(call.model, caller=caller)[1],
            id=own_id(request, call.members),
            inputs=request_tensors(call.body, call.endpoint, model.config),
            received_ns=call.received_ns,
            caller=caller,
            deadline=None if wishes is None else deadline_of(wishes, call.received_ns),
        )
        receipts, wished = self._dataplane.receipts, call.wants_timing
        if wished or receipts.every or WISH in request.scope["headers"]:
            infer_request = begin_receipt(
                *(request.scope, receipts, infer_request, call.whole_ns), wished=wished
            )
        if model.chooser is not None:
            infer_request = keyed(infer_request, model.chooser, request.scope, call.members)

        def submit() -> ResponseStream:
            trace = begin_trace(request.scope, self._dataplane.tracer, infer_request, call.whole_ns)
            if trace is not None:
                trace.asked = request_attributes(call.endpoint, call.members)
            return self._dataplane.infer(infer_request, model, trace)

        key = key_of(request.scope, *call.body)
        if key is None:
            return submit()
        asked = RecordedRequest(request.scope["path"], model, infer_request, key)
        return await self._recordings.open_anywhere(asked, submit)


def openai_refused(request: Request, error: InferenceError) -> Response:
    """Log a failed request, and return its response."""
    answer = _refused(request.scope["path"], request_id_header(request), error)
    receipt: Receipt | None = request.scope.get(RECEIPT)
    return answer if receipt is None else timed(answer, receipt)


def openai_error(request: Request, status: int, body: bytes) -> Response:
    """The response for an error before any part of an answer was sent."""
    return _error(request_id_header(request), status, body)


def _refused(path: str, headers: Mapping[str, str], error: InferenceError) -> Response:
    log_refusal(path, error)
    return _error({**headers, **error_headers(error)}, *openai_form(error))


def _error(headers: Mapping[str, str], status: int, body: bytes) -> Response:
    is_late = status == SERVICE_UNAVAILABLE and SHOULD_RETRY not in headers
    late = {"Retry-After": RETRY_AFTER_SECS} if is_late else {}
    return json_answer(body, status, {**late, **headers})
