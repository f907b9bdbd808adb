"""Which of vLLM's handlers serves which endpoint, and what does it take?"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import TypeAdapter
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
from vllm.entrypoints.pooling.scoring.serving import ServingScores
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMValidationError

from backends.vllm.grammar_time import check_schema
from backends.vllm.sampling import (
    MAX_ELEMENTS,
    MAX_OBJECT_BYTES,
    MAX_SEQUENCES,
    MAX_STRING_LENGTH,
    MAX_STRINGS,
)
from gateway.openai_exchange import Endpoint

MAX_GRAMMAR_BYTES = 1 << 16
"""The engine compiles a grammar in a time that may grow with its square: here about 15 s for a
schema of this size with nothing but properties, though a short pattern can take longer."""

MAX_PROMPTS = 2048
"""As many as OpenAI takes in one request for embeddings."""

MAX_TOKENIZED_BYTES = 1 << 20
"""All texts of all requests are tokenized one after the other, this much in about a second."""

TOKENIZERS = frozenset({Endpoint.TOKENIZE, Endpoint.DETOKENIZE})
"""Endpoints for which no context of a model is a limit."""

CONSTRAINTS = ("response_format", "structured_outputs", "tools", "text")
"""Members of a body that may become a grammar."""

GRAMMARS = ("json", "regex", "choice", "grammar", "structural_tag")
"""What a constraint of vLLM's holds, one of them."""


@dataclass(frozen=True, slots=True)
class EndpointService:
    """One endpoint: the type of its bodies, the handler's place in vLLM's state, and its method.

    `title` is what vLLM says that a model does not support which has no such handler. `dumped` are
    the arguments with which vLLM's own route writes an answer. `named` if the header X-Request-Id
    becomes the id in the answer.
    """

    body: TypeAdapter[Any]
    place: str
    method: Callable[[Any, Any, None], Awaitable[Any]]
    title: str
    dumped: Mapping[str, Any] = field(default_factory=dict)
    named: bool = True


SERVICES = {
    Endpoint.CHAT: EndpointService(
        TypeAdapter(ChatCompletionRequest),
        "openai_serving_chat",
        OpenAIServingChat.create_chat_completion,
        "Chat Completions",
    ),
    Endpoint.COMPLETIONS: EndpointService(
        TypeAdapter(CompletionRequest),
        "openai_serving_completion",
        OpenAIServingCompletion.create_completion,
        "Completions",
    ),
    Endpoint.RESPONSES: EndpointService(
        TypeAdapter(ResponsesRequest),
        "openai_serving_responses",
        OpenAIServingResponses.create_responses,
        "Responses",
        {"mode": "json", "by_alias": True},
        named=False,
    ),
    Endpoint.EMBEDDINGS: EndpointService(
        TypeAdapter(EmbeddingRequest),
        "serving_embedding",
        ServingEmbedding.__call__,
        "Embeddings",
    ),
    Endpoint.SCORE: EndpointService(
        TypeAdapter(ScoreRequest), "serving_scores", ServingScores.__call__, "Score"
    ),
    Endpoint.RERANK: EndpointService(
        TypeAdapter(RerankRequest), "serving_scores", ServingScores.__call__, "Rerank (Score)"
    ),
    Endpoint.TOKENIZE: EndpointService(
        TypeAdapter(TokenizeRequest),
        "serving_tokenization",
        ServingTokenization.create_tokenize,
        "Tokenize",
        named=False,
    ),
    Endpoint.DETOKENIZE: EndpointService(
        TypeAdapter(DetokenizeRequest),
        "serving_tokenization",
        ServingTokenization.create_detokenize,
        "Detokenize",
        named=False,
    ),
}
"""Every endpoint. The handlers' methods are those of vLLM: one that has moved fails the import."""


def check_body(body: Mapping[str, Any]) -> None:
    """Refuse what takes longer to read than others can wait."""
    for name in CONSTRAINTS:
        if body.get(name) and len(orjson.dumps(body[name])) > MAX_OBJECT_BYTES:
            _refuse(name, f"{name} is larger than the {MAX_OBJECT_BYTES} bytes of JSON allowed")
    # With tools beside them vLLM reads these before it asks the engine for anything.
    for name in ("response_format", "text"):
        check_schema(body.get(name))
    constraint = body.get("structured_outputs")
    if isinstance(constraint, dict):
        check_schema([constraint.get("json"), constraint.get("structural_tag")])


def check_size(endpoint: Endpoint, size: int) -> None:
    """Refuse a body of so many bytes if others would have to wait for it too long."""
    if endpoint in TOKENIZERS and size > MAX_TOKENIZED_BYTES:
        _refuse("", f"{endpoint} takes at most {MAX_TOKENIZED_BYTES} bytes of JSON, got {size}")


def check_count(prompts: int) -> None:
    """Refuse more prompts than one request may hold."""
    if prompts > MAX_PROMPTS:
        _refuse("prompt", f"more than the {MAX_PROMPTS} prompts that one request may have")


def check_parameters(parameters: Any) -> None:
    """Refuse sampling parameters that would keep the gateway busy; vLLM checks the rest."""
    _check("n", parameters.n, MAX_SEQUENCES)
    for name in ("stop", "bad_words"):
        strings = getattr(parameters, name) or ()
        _check(f"the number of strings in {name}", len(strings), MAX_STRINGS, name)
        longest = max(map(len, strings), default=0)
        _check(f"the length of a string in {name}", longest, MAX_STRING_LENGTH, name)
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        elements = len(getattr(parameters, name) or ())
        _check(f"the number of elements in {name}", elements, MAX_ELEMENTS, name)
    if parameters.structured_outputs is not None:
        _check_grammar(parameters.structured_outputs)


def _check_grammar(constraint: Any) -> None:
    """Whichever part of the request it comes from: a schema, an expression, or the tools."""
    given = (getattr(constraint, name) for name in GRAMMARS)
    size = sum(len(orjson.dumps(each)) for each in given if each is not None)
    _check("the size of the grammar in bytes", size, MAX_GRAMMAR_BYTES, "structured_outputs")


def _check(what: str, value: int, limit: int, parameter: str = "n") -> None:
    if value > limit:
        _refuse(parameter, f"{what} is {value}, expected at most {limit}")


def _refuse(parameter: str, message: str) -> None:
    raise VLLMValidationError(message, parameter=parameter or None)
