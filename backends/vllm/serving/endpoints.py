"""Which of vLLM's handlers serves which endpoint, and what does it take?"""

from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

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

from backends.vllm.serving.exchange import Exchange
from gateway.openai_exchange import Endpoint


@dataclass(frozen=True, slots=True)
class Service:
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

    async def call(self, state: Any, body: Any, exchange: Exchange) -> Any:
        """Have the handler serve a body; raises what vLLM raises."""
        handler = getattr(state, self.place, None)
        if handler is None:
            raise NotImplementedError(f"The model does not support {self.title} API")
        if hasattr(handler, "engine_client"):
            handler = copy(handler)
            handler.engine_client = exchange
        return await self.method(handler, body, None)


SERVICES = {
    Endpoint.CHAT: Service(
        TypeAdapter(ChatCompletionRequest),
        "openai_serving_chat",
        OpenAIServingChat.create_chat_completion,
        "Chat Completions",
    ),
    Endpoint.COMPLETIONS: Service(
        TypeAdapter(CompletionRequest),
        "openai_serving_completion",
        OpenAIServingCompletion.create_completion,
        "Completions",
    ),
    Endpoint.RESPONSES: Service(
        TypeAdapter(ResponsesRequest),
        "openai_serving_responses",
        OpenAIServingResponses.create_responses,
        "Responses",
        {"mode": "json", "by_alias": True},
        named=False,
    ),
    Endpoint.EMBEDDINGS: Service(
        TypeAdapter(EmbeddingRequest),
        "serving_embedding",
        ServingEmbedding.__call__,
        "Embeddings",
    ),
    Endpoint.SCORE: Service(
        TypeAdapter(ScoreRequest), "serving_scores", ServingScores.__call__, "Score"
    ),
    Endpoint.RERANK: Service(
        TypeAdapter(RerankRequest), "serving_scores", ServingScores.__call__, "Rerank (Score)"
    ),
    Endpoint.TOKENIZE: Service(
        TypeAdapter(TokenizeRequest),
        "serving_tokenization",
        ServingTokenization.create_tokenize,
        "Tokenize",
        named=False,
    ),
    Endpoint.DETOKENIZE: Service(
        TypeAdapter(DetokenizeRequest),
        "serving_tokenization",
        ServingTokenization.create_detokenize,
        "Detokenize",
        named=False,
    ),
}
"""Every endpoint. The handlers' methods are those of vLLM: one that has moved fails the import."""
