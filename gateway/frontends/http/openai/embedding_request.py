"""The members of an embeddings request, for models that do not read them themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.frontends.http.openai.errors import refusal

MOST_TEXTS = 2048
"""In one request, as at OpenAI."""


class Encoding(StrEnum):
    """How an embedding is written: a list of numbers, or the bytes of its FP32 in base64."""

    FLOAT = "float"
    BASE64 = "base64"


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """What is asked for; `dimensions` are those to keep of each embedding."""

    texts: Sequence[str]
    encoding: Encoding
    dimensions: int


def read_embedding_request(members: Mapping[str, Any], size: int) -> EmbeddingRequest:
    """The request to a model whose embeddings have that size; INVALID_ARG says what is wrong."""
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
    return refusal(Code.INVALID_ARG, message, param)
