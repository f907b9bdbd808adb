"""Similarity of texts by the embeddings of a loaded model."""

import asyncio
from collections.abc import Callable

import numpy as np
import orjson

from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse, single
from gateway.models.golden.tensor_checks import Mismatch
from gateway.models.golden.text_checks import Skipped
from gateway.models.model import Model
from gateway.openai_contract import (
    RESPONSE,
    Endpoint,
    RequestBody,
    declares_endpoint,
    request_tensors,
    serves_openai,
)
from gateway.text_encoder import Vector, encoder_of

LIMIT_SECS = 30.0
"""Longest time for the embeddings of two texts."""

Find = Callable[[str, str], Model]
"""A loaded model by name and version; raises InferenceError."""


async def cosine(find: Find, model: str, one: str, other: str) -> float:
    """The cosine of the embeddings of two texts.

    Raises Skipped if the model is not loaded, Mismatch if it embeds no texts, or fails.
    """
    try:
        found = find(model, "")
    except InferenceError as error:
        raise Skipped(f"model '{model}' is not loaded: {error.message}") from None
    try:
        async with asyncio.timeout(LIMIT_SECS):
            a, b = await _embedding(found, one), await _embedding(found, other)
    except TimeoutError:
        raise Mismatch(f"model '{model}' did not answer within {LIMIT_SECS:g} s") from None
    except InferenceError as error:
        raise Mismatch(f"model '{model}' failed: {error.reason}") from None
    if a.size != b.size:
        raise Mismatch(f"model '{model}' has embeddings of {a.size} and {b.size} numbers")
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


async def _embedding(model: Model, text: str) -> Vector:
    encoder = encoder_of(model.config)
    if encoder is not None:
        return encoder.vector(await _answer(model, encoder.request(text, "", 0)))
    if not (serves_openai(model.config) and declares_endpoint(model.config)):
        raise Mismatch(f"model '{model.name}' does not embed texts")
    body = orjson.dumps({"model": model.name, "input": text, "encoding_format": "float"})
    inputs = request_tensors(RequestBody(body), Endpoint.EMBEDDINGS, model.config)
    return _vector(await _answer(model, InferRequest(model=model.name, inputs=inputs)), model.name)


async def _answer(model: Model, request: InferRequest) -> InferResponse:
    with model.submit(request) as stream:
        return single([response async for response in stream])


def _vector(response: InferResponse, model: str) -> Vector:
    """The embedding in OpenAI's answer to one text."""
    found = response.output(RESPONSE)
    try:
        (text,) = () if found is None else found.elements()
        (item,) = orjson.loads(text)["data"]
        vector = np.array(item["embedding"], np.float32)
        if vector.ndim == 1 and vector.size and np.isfinite(vector).all():
            return vector
    except (ValueError, LookupError, TypeError):
        pass
    raise Mismatch(f"model '{model}' did not answer with one embedding of finite numbers")
