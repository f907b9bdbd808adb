"""Beginnings of prompts in the engine's cache: each is known to its tenant alone."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.messages import InferRequest
from gateway.policy.caller import Caller
from tests.backends.vllm.conftest import Llama, ask, engine_marks, openai

pytestmark = engine_marks

CACHED = "vllm:prefix_cache_hits_total"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 1}
STORY = "Once upon a time there was a fox. " * 40


def chat(text: str, **members: Any) -> InferRequest:
    """A conversation, as OpenAI's clients send it."""
    return openai({"messages": [{"role": "user", "content": text}], **GREEDY, **members})


async def cached(llama: Llama, request: InferRequest, tenant: str) -> bool:
    """Whether the engine knows the beginning of the prompt of a tenant's request."""
    before = llama.metric(CACHED)
    await llama.answers(replace(request, caller=Caller(tenant=tenant) if tenant else None))
    await llama.running(0)
    return llama.metric(CACHED) > before


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_a_beginning_is_known_to_the_tenant_that_sent_it(llama: Llama, kind: str) -> None:
    text = f"{kind}: {STORY}"
    request = ask(text, **GREEDY) if kind == "text" else chat(text)
    expected = [("a", False), ("a", True), ("b", False), ("", False), ("b", True), ("", True)]
    assert [(each, await cached(llama, request, each)) for each, _ in expected] == expected


async def test_a_tenants_own_salts_keep_its_prompts_apart(llama: Llama) -> None:
    one, two = (chat(f"salted: {STORY}", cache_salt=salt) for salt in ("one", "two"))
    asked = [(one, "a"), (two, "a"), (one, "b"), (one, "a")]
    found = [await cached(llama, request, tenant) for request, tenant in asked]
    assert found == [False, False, False, True]
