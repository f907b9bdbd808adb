"""Requests to language models in the names of OpenTelemetry's conventions for generative AI.

Of the texts of clients they have ids only: neither prompts nor answers.
"""

import re
from collections.abc import Mapping
from typing import Any

from gateway.messages import EngineStamps, InferRequest, InferResponse, Usage
from gateway.openai_contract import ENDPOINT, REQUEST, RESPONSE, Endpoint
from gateway.tensor import Buffer

PROVIDER = "sluice"
OPERATIONS: Mapping[str, str] = {
    Endpoint.CHAT: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
}
OTHER_OPERATION = "text_completion"
"""The operation of requests that do not come through OpenAI's API."""
NUMBERS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
}
"""Members of a request with numbers, and their attributes."""
CONVERSATION_ID = "gen_ai.conversation.id"
ID_BYTES = 256
ID = re.compile(rb'\{"id":\s?"([\w.:-]{1,128})"')
REASONING = re.compile(
    rb'"(?:completion|output)_tokens_details":\s?\{[^{}]*"reasoning_tokens":\s?(\d{1,18})\b'
)
"""The tokens of thoughts in the usage of an answer of OpenAI's API: texts have no bare quotes."""
USAGE_BYTES = 2048
"""The end of an answer, in which its usage stands."""
NO_TOKENS = Usage()
MOST_INTEGER = 2**63
"""Attributes are integers of 64 bits."""


def operation_of(request: InferRequest) -> str:
    """The operation of a request of OpenAI's API; "" for others."""
    if request.input(REQUEST) is None:
        return ""
    endpoint = request.input(ENDPOINT)
    name = Endpoint.CHAT.value if endpoint is None else bytes(endpoint.elements()[0]).decode()
    return OPERATIONS.get(name, "")


def request_attributes(endpoint: Endpoint, members: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a request of OpenAI's API; {} for endpoints without an operation."""
    operation = OPERATIONS.get(endpoint)
    if operation is None:
        return {}
    found: dict[str, Any] = {"gen_ai.operation.name": operation}
    for name, attribute in NUMBERS.items():
        number = members.get(name)
        if type(number) is float or (type(number) is int and abs(number) < MOST_INTEGER):
            found[attribute] = number
    if members.get("stream") is True:
        found["gen_ai.request.stream"] = True
    choices = members.get("n")
    if type(choices) is int and 1 < choices < MOST_INTEGER:
        found["gen_ai.request.choice.count"] = choices
    return found


class Generated:
    """The answer of a language model: its id and its end, and the times of its engine.

    `usage` are the tokens of the whole answer, as the record has counted them by its end,
    `reasoning_tokens` those of its thoughts, if its text has them.
    """

    __slots__ = ("engine", "finish_reason", "first_ns", "id", "reasoning_tokens", "usage")

    def __init__(self) -> None:
        self.usage = NO_TOKENS
        self.finish_reason = self.id = ""
        self.first_ns = 0
        self.engine: EngineStamps | None = None
        self.reasoning_tokens: int | None = None

    def add(self, response: InferResponse, ns: int) -> None:
        """Note a response that arrived at that time."""
        text = _text(response)
        if not self.first_ns:
            self.first_ns = ns
            found = ID.match(text[:ID_BYTES])
            self.id = found[1].decode() if found else ""
        if reported := REASONING.search(text[-USAGE_BYTES:]):
            self.reasoning_tokens = int(reported[1])
        self.engine = response.engine or self.engine
        if response.usage is not None:
            self.finish_reason = response.usage.finish_reason or self.finish_reason

    @property
    def has_tokens(self) -> bool:
        """Whether any tokens were counted."""
        return bool(self.usage.prompt_tokens or self.usage.completion_tokens)

    def attributes(self, model: str, received_ns: int) -> dict[str, Any]:
        """The attributes of the answer of that model to a request received at that time."""
        usage = self.usage
        found: dict[str, Any] = {
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.response.time_to_first_chunk": (self.first_ns - received_ns) / 1e9,
        }
        if usage.cached_tokens is not None:
            found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        if self.reasoning_tokens is not None:
            found["gen_ai.usage.reasoning.output_tokens"] = self.reasoning_tokens
        if self.finish_reason:
            found["gen_ai.response.finish_reasons"] = (self.finish_reason,)
        if self.id:
            found["gen_ai.response.id"] = self.id
        return found


def _text(response: InferResponse) -> Buffer:
    """The JSON of an answer of OpenAI's API, or of a part of one; empty for other responses."""
    output = response.output(RESPONSE)
    return output.data[0] if output is not None and isinstance(output.data, tuple) else b""
