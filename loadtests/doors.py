"""How is each kind of server asked for text, and what does it call its counters of tokens?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from loadtests.server import Server
from loadtests.sse import Address, post
from loadtests.token_counters import TokenCounters

Question = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""The body of a request, from a prompt and its sampling parameters."""


@dataclass(frozen=True, slots=True)
class Door:
    """One server's way in."""

    path: str
    question: Question
    prompt_counter: str
    completion_counter: str

    def encode(self, address: Address, prompt: str, max_tokens: int) -> bytes:
        """The bytes of a request for exactly so many tokens, the likeliest ones."""
        sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return post(self.path, address, orjson.dumps(self.question(prompt, sampling)))

    def counters(self, server: Server) -> TokenCounters:
        """The counters of a server behind this door."""
        return TokenCounters(server.ports.metrics, self.prompt_counter, self.completion_counter)


GATEWAY_COUNTERS = ("gateway_prompt_tokens_total", "gateway_completion_tokens_total")
VLLM_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def generate(model: str) -> Door:
    """The gateway's generate extension."""

    def question(prompt: str, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"text_input": prompt, "stream": True, "parameters": sampling}

    return Door(f"/v2/models/{model}/generate_stream", question, *GATEWAY_COUNTERS)


def completions(model: str) -> Door:
    """OpenAI's completions of vLLM."""

    def question(prompt: str, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"model": model, "prompt": prompt, "stream": True, **sampling}

    return Door("/v1/completions", question, *VLLM_COUNTERS)


def chat(model: str, counters: tuple[str, str]) -> Door:
    """OpenAI's chat, of a server with these counters."""

    def question(prompt: str, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"model": model, "messages": messages, "stream": True, **sampling}

    return Door("/v1/chat/completions", question, *counters)
