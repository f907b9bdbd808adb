"""OpenAI's requests: a body in, the chunks of the model that it names out."""

from contextlib import ExitStack
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from gateway.dataplane import DataPlane
from gateway.frontends.http.body import OnDisconnect, read_body
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.openai.call import STREAMING, Call, read_call
from gateway.frontends.http.openai.chunks import ChunkEncoder
from gateway.frontends.http.openai.embeddings import EmbeddingsDoor
from gateway.frontends.http.openai.events import ChunkedResponse
from gateway.frontends.http.openai.request_id import own_id, request_id_header
from gateway.frontends.http.openai.served import ServedModels
from gateway.frontends.http.resumable import LAST_EVENT_ID, key_of, replay_headers, resumed
from gateway.frontends.http.sse import first_batch
from gateway.frontends.http.tracing import infer
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.openai_contract import Endpoint, request_tensors, serves_openai
from gateway.resumption.reader import Responses
from gateway.resumption.recording import RecordedRequest
from gateway.resumption.recordings import Recordings
from gateway.settings import HttpSettings


class OpenAiDoor:
    """Answers OpenAI's requests by models that have the contract of `openai_contract`.

    A request with an idempotency key is recorded: the same once more gets the same answer, and a
    stream that was cut can be gone on with.
    """

    def __init__(
        self, dataplane: DataPlane, settings: HttpSettings, recordings: Recordings
    ) -> None:
        self._dataplane = dataplane
        self._settings = settings
        self._recordings = recordings
        self._models = ServedModels(dataplane)
        self._embeddings = EmbeddingsDoor(dataplane)

    async def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """Answer one request; InferenceError if there is nothing else to answer it with."""
        if endpoint in STREAMING and request.headers.get(LAST_EVENT_ID):
            return await self._resume(request, endpoint)
        call = await read_call(
            request, endpoint, self._settings.max_input_size, self._dataplane.threads
        )
        model = self._models.find(call.model, endpoint)
        if not serves_openai(model.config):
            return await self._embeddings.answer(request, call, model)
        responses = self._infer(request, call, model)
        encoder = ChunkEncoder(model.name, endpoint)
        if call.stream:
            return await self._stream(request, responses, encoder)
        with responses, OnDisconnect(request.scope, responses.cancel):
            body = encoder.whole(await responses.only())
        headers = {**request_id_header(request), **replay_headers(responses)}
        return Response(body, headers=headers, media_type=JSON)

    async def _resume(self, request: Request, endpoint: Endpoint) -> Response:
        """What follows the last chunk that the client has got; its body says nothing new."""
        await read_body(request, self._settings.max_input_size)
        reader = resumed(self._recordings, request.scope)
        encoder = ChunkEncoder(reader.recorded.request.model, endpoint)
        return await self._stream(request, reader, encoder)

    async def _stream(
        self, request: Request, responses: Responses, encoder: ChunkEncoder
    ) -> Response:
        """A chunk for each response; an error before the first has a status of its own."""
        with ExitStack() as owner:
            owner.enter_context(responses)
            limit_secs = self._settings.first_response_secs
            first = await first_batch(responses, request.scope, limit_secs)
            headers = request_id_header(request)
            response = ChunkedResponse(responses, first, encoder, self._settings, headers)
            owner.pop_all()
        return response

    def _infer(self, request: Request, call: Call, model: Model) -> Responses:
        infer_request = InferRequest(
            model=model.name,
            id=own_id(request, call.members),
            inputs=request_tensors(call.body, call.endpoint, model.config),
            received_ns=call.received_ns,
        )
        submit = partial(infer, self._dataplane, request.scope, infer_request, model)
        key = key_of(request.scope, call.body)
        if key is None:
            return submit()
        return self._recordings.open(
            RecordedRequest(request.scope["path"], model, infer_request, key), submit
        )
