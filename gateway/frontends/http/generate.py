"""The generate extension: JSON in, one JSON object or server-sent events out."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.body import OnDisconnect, read_body
from gateway.frontends.http.codec import ResponseEncoder, decode_generate, has_data
from gateway.frontends.http.errors import JSON, error_body
from gateway.frontends.http.paths import MODEL, VERSION, version_of
from gateway.frontends.http.request_json import parse_json_object
from gateway.frontends.http.sse import StreamedResponse
from gateway.frontends.http.tracing import begin
from gateway.messages import InferRequest, InferResponse
from gateway.settings import HttpSettings
from gateway.stream import ResponseStream

NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)


class GenerateRoutes:
    """`POST /v2/models/{model}[/versions/{version}]/generate` and `generate_stream`."""

    def __init__(self, dataplane: DataPlane, settings: HttpSettings) -> None:
        self._dataplane = dataplane
        self._settings = settings

    def routes(self) -> list[Route]:
        """The plain routes, without FastAPI's per-request models."""
        return [
            Route(f"{path}/{name}", endpoint, methods=["POST"])
            for path in (MODEL, VERSION)
            for name, endpoint in (
                ("generate", self.generate),
                ("generate_stream", self.generate_stream),
            )
        ]

    async def generate(self, request: Request) -> Response:
        """Answer with exactly one JSON object."""
        infer_request, encoder = await self._decode(request)
        stream = self._infer(request, infer_request)
        with stream, OnDisconnect(request.scope, stream.cancel):
            response = await _single(stream)
        # Triton answers 200 here: the status was decided when the model began to respond.
        body = encoder.encode(response) if response is not None else error_body(NOT_ONE)
        return Response(body, media_type=JSON)

    async def generate_stream(self, request: Request) -> Response:
        """Answer with one event per response; an error before the first is a plain error."""
        infer_request, encoder = await self._decode(request)
        with ExitStack() as owner:
            stream = owner.enter_context(self._infer(request, infer_request))
            with OnDisconnect(request.scope, stream.cancel):
                first = await self._first_batch(stream)
            response = StreamedResponse(stream, first, encoder, self._settings)
            owner.pop_all()
        return response

    def _infer(self, request: Request, infer_request: InferRequest) -> ResponseStream:
        trace = begin(self._dataplane.tracer, request.scope, infer_request)
        return self._dataplane.infer(infer_request, trace=trace)

    async def _decode(self, request: Request) -> tuple[InferRequest, ResponseEncoder]:
        received_ns = time.perf_counter_ns()
        model_name = request.path_params["model"]
        version = version_of(request)
        model = self._dataplane.model(model_name, version)
        _refuse_encoding(request)
        body = await read_body(request, self._settings.max_input_size)
        decoded = decode_generate(parse_json_object(body), model.config, version)
        infer_request = replace(decoded, received_ns=received_ns)
        return infer_request, ResponseEncoder(model_name, model.version, infer_request.id)

    async def _first_batch(self, stream: ResponseStream) -> Sequence[InferResponse] | None:
        """What the model answers first, or None if that takes longer than clients should wait."""
        try:
            async with asyncio.timeout(self._settings.first_response_secs):
                return await stream.batch()
        except TimeoutError:
            return None


async def _single(stream: ResponseStream) -> InferResponse | None:
    """The one response with data; None as soon as it is clear that there are none or several."""
    found: list[InferResponse] = []
    while batch := await stream.batch():
        found += [response for response in batch if has_data(response)]
        if len(found) > 1:
            return None
    return found[0] if found else None


def _refuse_encoding(request: Request) -> None:
    if request.headers.get("content-encoding", "identity") not in ("", "identity"):
        raise InferenceError(
            Code.INVALID_ARG, "Unsupported content-encoding, only 'identity' is supported."
        )
