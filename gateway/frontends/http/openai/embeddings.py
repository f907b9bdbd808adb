"""Embeddings by models without OpenAI's contract: each text is an inference request.

The model's batcher combines texts, also those of other clients.
"""

import asyncio
import base64
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.deadlines import deadline_of, read_wishes
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, Refusal
from gateway.frontends.http.errors import JSON, openai_refusal
from gateway.frontends.http.openai.request import (
    OpenAiRequest,
    request_id,
    request_id_header,
)
from gateway.frontends.http.request_scope import OnDisconnect, begin_trace, caller_in
from gateway.frontends.http.rollout_keys import keyed
from gateway.frontends.http.timing import WISH, begin_receipt, timed
from gateway.messages import InferRequest, InferResponse
from gateway.models.model import Model
from gateway.observability.receipt import Receipt, ended_ns, receipt_of
from gateway.stream import ResponseStream
from gateway.text_encoder import TextEncoder, Vector, encoder_of

MOST_TEXTS = 2048
"""Texts of one request, as at OpenAI."""

BURST = 32
"""Requests submitted in a row before the event loop runs other tasks."""

AT_ONCE = 256
"""Texts of one request in flight: more than the batches of a model's instances hold."""


class Encoding(StrEnum):
    """The form of an embedding: a list of numbers, or its little-endian FP32 in base64."""

    FLOAT = "float"
    BASE64 = "base64"


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """One request; the first `dimensions` of each embedding are kept."""

    texts: Sequence[str]
    encoding: Encoding
    dimensions: int


def read_embedding_request(members: Mapping[str, Any], size: int) -> EmbeddingRequest:
    """Read a request to a model whose embeddings have that size; INVALID_ARG if it is invalid."""
    return EmbeddingRequest(
        _texts(members.get("input")),
        _encoding(members.get("encoding_format")),
        _dimensions(members.get("dimensions"), size),
    )


def _texts(given: Any) -> Sequence[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        raise _invalid("input", "`input` is no text, and no list of at least one text")
    if len(texts) > MOST_TEXTS:
        raise _invalid("input", f"`input` has {len(texts)} texts, expected at most {MOST_TEXTS}")
    for index, text in enumerate(texts):
        _check_text(index, text)
    return texts


def _check_text(index: int, text: Any) -> None:
    if isinstance(text, int | list):
        raise _invalid("input", "`input` has token ids, which this model does not take: send texts")
    if not isinstance(text, str):
        raise _invalid("input", f"`input` has something other than a text at {index}")
    if not text:
        raise _invalid("input", f"`input` has an empty text at {index}, expected some characters")


def _encoding(given: Any) -> Encoding:
    if given is None:
        return Encoding.FLOAT
    if given not in tuple(Encoding):
        raise _invalid("encoding_format", "`encoding_format` is neither 'float' nor 'base64'")
    return Encoding(given)


def _dimensions(given: Any, size: int) -> int:
    if given is None:
        return size
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= size:
        raise _invalid(
            "dimensions",
            f"`dimensions` is {str(given)[:40]}, expected a number from 1 to {size}, which is what "
            "the model has",
        )
    return given


def _invalid(param: str, message: str) -> InferenceError:
    return openai_refusal(Code.INVALID_ARG, message, param)


class RequestWindow:
    """Requests submitted a limited number at a time; their responses are taken in order.

    Used inside `with`, whose exit cancels the rest, and by one task. When the model is full, the
    limit becomes the number of requests that it accepted. If that is 0, its error is raised.
    """

    def __init__(
        self,
        submit: Callable[[InferRequest], ResponseStream],
        requests: Sequence[InferRequest],
        limit: int,
    ) -> None:
        self._submit = submit
        self._requests = deque(requests)
        self._limit = limit
        self._streams: deque[ResponseStream] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel all requests; idempotent. A pending `take` raises CANCELLED."""
        self._requests.clear()
        for stream in self._streams:
            stream.cancel()

    async def take(self) -> InferResponse | None:
        """The next response, None after the last; raises the error of that request."""
        await self._fill()
        if not self._streams:
            return None
        response = await self._streams[0].only()
        self._streams.popleft()
        return response

    async def _fill(self) -> None:
        while self._requests and len(self._streams) < self._limit:
            try:
                self._streams.append(self._submit(self._requests[0]))
            except InferenceError as error:
                if error.code is not Code.UNAVAILABLE or not self._streams:
                    raise
                self._limit = len(self._streams)
                return
            self._requests.popleft()
            if len(self._requests) % BURST == 0:
                await asyncio.sleep(0)


class EmbeddingAnswers:
    """Answers embeddings requests with encoders."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    async def answer(self, request: Request, call: OpenAiRequest, model: Model) -> Response:
        """The embeddings of all texts; the first error fails the request."""
        encoder = encoder_of(model.config)
        assert encoder is not None  # noqa: S101 - it serves the endpoint
        asked = read_embedding_request(call.members, encoder.size)
        found, caller = request_id(request), caller_in(request.scope)
        _, version = self._dataplane.address(call.model, caller=caller)
        requests = [
            encoder.request(text, found, call.received_ns, caller, version) for text in asked.texts
        ]
        wishes = read_wishes(request.scope["headers"])
        deadline = deadline_of(wishes, call.received_ns)
        receipt = self._receipt(request, call, requests[0])
        texts = None if receipt is None else TextReceipts(receipt)
        prepaid = self._take(requests, model)

        def submit(each: InferRequest) -> ResponseStream:
            if prepaid or deadline is not None or texts is not None:
                one = None if texts is None else texts.begin()
                each = replace(each, deadline=deadline, prepaid=prepaid, receipt=one)
            trace = begin_trace(request.scope, self._dataplane.tracer, each, call.whole_ns)
            if model.chooser is not None:
                each = keyed(each, model.chooser, request.scope, call.members)
            return self._dataplane.infer(each, model, trace)

        window, items = RequestWindow(submit, requests, AT_ONCE), _Items(encoder, asked)
        try:
            with window, OnDisconnect(request.scope, window.cancel):
                await _read(window, items)
        finally:
            if texts is not None:
                texts.end(items.count)
        body = items.whole(found, call.model or model.name)
        headers = {**request_id_header(request), **self._dataplane.limits(caller)}
        answer = Response(body, headers=headers, media_type=JSON)
        return answer if receipt is None else timed(answer, receipt)

    def _receipt(
        self, request: Request, call: OpenAiRequest, first: InferRequest
    ) -> Receipt | None:
        """The receipt of the answer, if its client asks for one; `first` is the first text."""
        receipts, wished = self._dataplane.receipts, call.wants_timing
        if wished or receipts.every or WISH in request.scope["headers"]:
            begin_receipt(request.scope, receipts, first, call.whole_ns, wished=wished)
        return receipt_of(first)

    def _take(self, requests: Sequence[InferRequest], model: Model) -> bool:
        """Whether the limits of a tenant have counted all texts; raises Refusal."""
        admission, first = self._dataplane.admission, requests[0]
        if admission is None:
            return False
        try:
            admission.take_requests(first.caller, model, len(requests))
        except Refusal as error:
            if first.receipt is not None:
                first.receipt.refused(first, error)
            raise
        return True


class TextReceipts:
    """The receipts of the texts of one answer, which has that of one of them.

    That is the text that failed, or else the one that ended last.
    """

    def __init__(self, whole: Receipt) -> None:
        self._whole = whole
        self._texts: list[Receipt] = []

    def begin(self) -> Receipt:
        """The receipt of the next text, or of the last one if that was not accepted."""
        if self._texts and self._texts[-1].record is None:
            self._texts.pop()
        self._texts.append(Receipt(self._whole.begun_ns, self._whole.whole_ns, asked=False))
        return self._texts[-1]

    def end(self, answered: int) -> None:
        """End the receipt of the answer, which has that number of embeddings."""
        if answered < len(self._texts):
            self._whole.becomes(self._texts[answered], self._texts[0])
        elif self._texts:
            self._whole.becomes(max(self._texts, key=ended_ns), self._texts[0])


class _Items:
    """The JSON of each embedding, in the order of the texts."""

    def __init__(self, encoder: TextEncoder, asked: EmbeddingRequest) -> None:
        self._encoder = encoder
        self._asked = asked
        self._written: list[bytes] = []
        self._tokens = 0

    @property
    def count(self) -> int:
        """The number of embeddings."""
        return len(self._written)

    def add(self, response: InferResponse) -> None:
        """Encode the next one on arrival: encoding all at once would block the event loop."""
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


async def _read(window: RequestWindow, items: _Items) -> None:
    try:
        while (response := await window.take()) is not None:
            items.add(response)
    except InferenceError as error:
        if isinstance(error, Refusal):
            raise
        message = f"text {items.count} of `input`: {error.message}"
        raise InferenceError(error.code, message) from error


def shorten(vector: Vector, dimensions: int) -> Vector:
    """The first dimensions of an embedding, normalised to length 1 if any were cut off."""
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
