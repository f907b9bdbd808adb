"""`/v1/embeddings` of a model that has tensors for it: each text is a request of its own.

So the model's batcher decides what is executed together, also with the texts of other clients.
"""

import base64
import time
from functools import partial

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.frontends.http.body import OnDisconnect
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.openai.embedding_request import (
    EmbeddingRequest,
    Encoding,
    read_embedding_request,
)
from gateway.frontends.http.openai.encoders import Encoder, Vector, encoder_of
from gateway.frontends.http.openai.request import Call
from gateway.frontends.http.openai.request_id import request_id, request_id_header
from gateway.frontends.http.openai.window import RequestWindow
from gateway.frontends.http.tracing import infer
from gateway.messages import InferResponse
from gateway.models.model import Model

AT_ONCE = 256
"""Texts of one request that are in flight: more than the batches of a model's instances hold."""


class EmbeddingsDoor:
    """Answers embeddings requests by encoders."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    async def answer(self, request: Request, call: Call, model: Model) -> Response:
        """The embeddings of all texts; the first error of any is that of the request."""
        encoder = encoder_of(model.config)
        assert encoder is not None  # noqa: S101 - or it would not serve the endpoint
        asked = read_embedding_request(call.members, encoder.size)
        found = request_id(request)
        requests = [encoder.request(text, found, call.received_ns) for text in asked.texts]
        submit = partial(infer, self._dataplane, request.scope, model=model)
        window = RequestWindow(submit, requests, AT_ONCE)
        with window, OnDisconnect(request.scope, window.cancel):
            answered = await _read(window, _Items(encoder, asked))
        body = answered.whole(found, call.model or model.name)
        return Response(body, headers=request_id_header(request), media_type=JSON)


class _Items:
    """The JSON of each embedding, in the order of the texts."""

    def __init__(self, encoder: Encoder, asked: EmbeddingRequest) -> None:
        self._encoder = encoder
        self._asked = asked
        self._written: list[bytes] = []
        self._tokens = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._written)

    def add(self, response: InferResponse) -> None:
        """Write the next one, as soon as it is there: all at once would hold up everybody else."""
        vector = shorten(self._encoder.vector(response), self._asked.dimensions)
        self._written.append(_item(self.count, vector, self._asked.encoding))
        self._tokens += self._encoder.tokens(response)

    def whole(self, found: str, model: str) -> bytes:
        """The JSON of the answer."""
        members = {
            "id": f"embd-{found}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "usage": {"prompt_tokens": self._tokens, "total_tokens": self._tokens},
        }
        return b'%b,"data":[%b]}' % (orjson.dumps(members)[:-1], b",".join(self._written))


async def _read(window: RequestWindow, items: _Items) -> _Items:
    try:
        while (response := await window.take()) is not None:
            items.add(response)
    except InferenceError as error:
        message = f"text {items.count} of `input`: {error.message}"
        raise InferenceError(error.code, message) from error
    return items


def shorten(vector: Vector, dimensions: int) -> Vector:
    """The first dimensions of an embedding, of length 1 again if any were cut off."""
    if dimensions == vector.size:
        return vector
    kept = vector[:dimensions]
    length = np.linalg.norm(kept)
    return kept / length if length else kept


def _item(index: int, vector: Vector, encoding: Encoding) -> bytes:
    found: Vector | str = vector
    if encoding is Encoding.BASE64:
        found = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    members = {"object": "embedding", "index": index, "embedding": found}
    return orjson.dumps(members, option=orjson.OPT_SERIALIZE_NUMPY)
