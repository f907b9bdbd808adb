"""Similarity of texts by the embeddings of a loaded model."""

import asyncio
from collections.abc import Callable

import numpy as np

from gateway.errors import InferenceError
from gateway.messages import single
from gateway.models.golden.tensor_checks import Mismatch
from gateway.models.golden.text_checks import Skipped
from gateway.models.model import Model
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
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


async def _embedding(model: Model, text: str) -> Vector:
    encoder = encoder_of(model.config)
    if encoder is None:
        raise Mismatch(f"model '{model.name}' does not embed texts")
    with model.submit(encoder.request(text, "", 0)) as stream:
        return encoder.vector(single([response async for response in stream]))
