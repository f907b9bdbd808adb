"""Endpoints of OpenAI's API: the body, limits, and vLLM's handler of each."""

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
from gateway.openai_contract import Endpoint

MAX_GRAMMAR_BYTES = 1 << 16
"""The time to compile a grammar may grow with the square of its size: here about 15 s for a schema
of this size that has only properties; a short pattern can take longer."""

MAX_PROMPTS = 2048
"""OpenAI's limit of one request for embeddings."""

MAX_TOKENIZED_BYTES = 1 << 20
"""The tokenizer processes one text at a time, this size in about a second."""

TOKENIZERS = frozenset({Endpoint.TOKENIZE, Endpoint.DETOKENIZE})
"""Endpoints that the context of the model does not limit."""

CONSTRAINTS = ("response_format", "structured_outputs", "tools", "text")
"""Members of a body that may become a grammar."""

GRAMMARS = ("json", "regex", "choice", "grammar", "structural_tag")
"""The members of a constraint of vLLM, one of which is set."""


@dataclass(frozen=True, slots=True)
class EndpointService:
    """One endpoint: the type of its bodies, the handler's place in vLLM's state, and its method.

    `title` is vLLM's name of the endpoint in errors. `dumped` are the arguments of `model_dump`
    in vLLM's own route. `named` is true if the header X-Request-Id becomes the id of the answer.
    `text_member` are the bytes before the text in each chunk of a stream, empty if there are none.
    """

    body: TypeAdapter[Any]
    place: str
    method: Callable[[Any, Any, None], Awaitable[Any]]
    title: str
    dumped: Mapping[str, Any] = field(default_factory=dict)
    named: bool = True
    text_member: bytes = b""


SERVICES = {
    Endpoint.CHAT: EndpointService(
        TypeAdapter(ChatCompletionRequest),
        "openai_serving_chat",
        OpenAIServingChat.create_chat_completion,
        "Chat Completions",
        text_member=b'"delta":{"content":',
    ),
    Endpoint.COMPLETIONS: EndpointService(
        TypeAdapter(CompletionRequest),
        "openai_serving_completion",
        OpenAIServingCompletion.create_completion,
        "Completions",
        text_member=b'"text":',
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
"""The service of each endpoint; if a release of vLLM moves a method, the import fails."""


def check_body(body: Mapping[str, Any]) -> None:
    """Refuse members that would block the event loop for too long."""
    for name in CONSTRAINTS:
        if body.get(name) and len(orjson.dumps(body[name])) > MAX_OBJECT_BYTES:
            _refuse(name, f"{name} is larger than the {MAX_OBJECT_BYTES} bytes of JSON allowed")
    # If the request has tools, vLLM reads these before it calls the engine.
    for name in ("response_format", "text"):
        check_schema(body.get(name))
    constraint = body.get("structured_outputs")
    if isinstance(constraint, dict):
        check_schema([constraint.get("json"), constraint.get("structural_tag")])


def check_size(endpoint: Endpoint, size: int) -> None:
    """Refuse a body of `size` bytes that would block the tokenizer for too long."""
    if endpoint in TOKENIZERS and size > MAX_TOKENIZED_BYTES:
        _refuse("", f"{endpoint} takes at most {MAX_TOKENIZED_BYTES} bytes of JSON, got {size}")


def check_count(prompts: int) -> None:
    """Refuse more prompts than the limit of one request."""
    if prompts > MAX_PROMPTS:
        _refuse("prompt", f"more than the {MAX_PROMPTS} prompts that one request may have")


def check_parameters(parameters: Any) -> None:
    """Refuse sampling parameters that would block the event loop; vLLM checks the others."""
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
    """Check the size of a grammar, from a schema, an expression, or the tools."""
    given = (getattr(constraint, name) for name in GRAMMARS)
    size = sum(len(orjson.dumps(each)) for each in given if each is not None)
    _check("the size of the grammar in bytes", size, MAX_GRAMMAR_BYTES, "structured_outputs")


def _check(what: str, value: int, limit: int, parameter: str = "n") -> None:
    if value > limit:
        _refuse(parameter, f"{what} is {value}, expected at most {limit}")


def _refuse(parameter: str, message: str) -> None:
    raise VLLMValidationError(message, parameter=parameter or None)
