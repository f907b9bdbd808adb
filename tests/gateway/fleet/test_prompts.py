"""Prompts as a router reads them: their bytes, and the keys of their prefixes."""

import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from gateway.fleet.keys import MOST_KEYS_OF_PROMPT, PIECE_BYTES
from gateway.fleet.prefixes import KeyChanges, KeyIndex
from gateway.fleet.prompts import ModelPrompts, keys_of_fleet
from gateway.generation import IMAGE, MESSAGES, SAMPLING_PARAMETERS, TEXT_INPUT
from gateway.messages import InferRequest, RoutedPrompt, SequenceTag, Usage
from gateway.openai_contract import REQUEST, RequestBody
from gateway.policy.caller import Caller
from gateway.tensor import Datatype, Tensor, text_tensor

LONG = "All happy families are alike. " * 120
SYSTEM = {"role": "system", "content": LONG}
TURN = {"role": "user", "content": "Why? " * 600}


@pytest.fixture
def prompts() -> ModelPrompts:
    return ModelPrompts(("m", 1), keys_of_fleet("sluice", b""), KeyIndex(), ("adapter",))


def asked(**inputs: str) -> InferRequest:
    tensors = tuple(text_tensor(name, [text]) for name, text in inputs.items())
    return InferRequest(model="m", inputs=tensors)


def openai(**members: Any) -> InferRequest:
    return asked(**{REQUEST: json.dumps(members)})


def chat(*messages: object, **members: Any) -> InferRequest:
    return openai(messages=messages, **members)


def common(one: RoutedPrompt, other: RoutedPrompt) -> int:
    """The number of equal leading keys."""
    pairs = zip(one.keys, other.keys, strict=False)
    return next(
        (n for n, (a, b) in enumerate(pairs) if a != b), min(map(len, (one.keys, other.keys)))
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (asked(text_input=LONG), asked(text_input=f"{LONG} Why?" * 2)),
        (chat(SYSTEM), chat(SYSTEM, TURN)),
        (openai(prompt=LONG), openai(prompt=LONG + "Why? " * 600)),
        (openai(prompt=[7] * 900), openai(prompt=[*[7] * 900, *[8] * 300])),
        (openai(input=LONG), openai(input=LONG + "Why? " * 600)),
        (openai(input=[SYSTEM], instructions="x"), openai(input=[SYSTEM, TURN], instructions="x")),
        (
            asked(**{MESSAGES: json.dumps([SYSTEM])}),
            asked(**{MESSAGES: json.dumps([SYSTEM, TURN])}),
        ),
    ],
)
def test_a_continued_prompt_has_the_keys_of_its_beginning(
    prompts: ModelPrompts, before: InferRequest, after: InferRequest
) -> None:
    first, second = prompts.read(before), prompts.read(after)
    assert len(first.keys) >= 2
    assert common(first, second) == len(first.keys)
    assert len(second.keys) > len(first.keys)
    assert second.size_bytes > first.size_bytes >= 1700


@pytest.mark.parametrize(
    "other",
    [
        chat(SYSTEM, TURN, tools=[{"type": "function"}]),
        chat(SYSTEM, TURN, model="adapter"),
        chat(SYSTEM, TURN, cache_salt="salt"),
        replace(chat(SYSTEM, TURN), caller=Caller(tenant="other")),
        chat({"role": "user", "content": LONG}, TURN),
    ],
)
def test_prompts_of_another_scope_share_no_key(prompts: ModelPrompts, other: InferRequest) -> None:
    assert not set(prompts.read(chat(SYSTEM, TURN)).keys) & set(prompts.read(other).keys)


def test_the_adapter_and_salt_of_a_text_are_sampling_parameters(prompts: ModelPrompts) -> None:
    plain = asked(text_input=LONG)
    given = [
        plain,
        replace(plain, parameters={"lora_name": "adapter"}),
        replace(plain, parameters={"cache_salt": "salt"}),
        asked(**{TEXT_INPUT: LONG, SAMPLING_PARAMETERS: json.dumps({"lora_name": "other"})}),
    ]
    assert len({prompts.read(each).keys[0] for each in given}) == len(given)
    same = replace(plain, parameters={"max_tokens": 3, "temperature": 0.5})
    assert prompts.read(same) == prompts.read(plain)


def test_other_members_of_a_request_are_not_in_the_keys(prompts: ModelPrompts) -> None:
    other = chat(SYSTEM, TURN, model="m", temperature=1, stream=True)
    assert prompts.read(other) == prompts.read(chat(SYSTEM, TURN))


def test_the_members_of_a_parsed_body_are_left_to_the_model(prompts: ModelPrompts) -> None:
    members = {"messages": [SYSTEM, TURN]}
    body = RequestBody(json.dumps(members).encode(), members)
    request = InferRequest(model="m", inputs=(Tensor(REQUEST, Datatype.BYTES, (1,), body),))
    assert prompts.read(request) == prompts.read(chat(SYSTEM, TURN))
    assert body.take() is members


@pytest.mark.parametrize(
    "request_without_keys",
    [
        asked(text_input="x" * (PIECE_BYTES - 1)),
        replace(asked(text_input=LONG), sequence=SequenceTag(7)),
        asked(**{TEXT_INPUT: LONG, IMAGE: "AAAA"}),
        asked(**{REQUEST: f"no JSON {LONG}"}),
        asked(**{REQUEST: json.dumps([LONG])}),
        asked(**{MESSAGES: f"no JSON {LONG}"}),
        asked(**{TEXT_INPUT: LONG, SAMPLING_PARAMETERS: "no JSON"}),
        asked(**{TEXT_INPUT: LONG, SAMPLING_PARAMETERS: "[1]"}),
        openai(prompt=[2**40] * 600),
        openai(messages="text", other=LONG),
        asked(other=LONG),
        openai(other=LONG),
        InferRequest(
            model="m", inputs=(Tensor(TEXT_INPUT, Datatype.BYTES, (1,), (b"\xff" * 1200,)),)
        ),
    ],
)
def test_a_prompt_without_keys_has_its_size(
    prompts: ModelPrompts, request_without_keys: InferRequest
) -> None:
    found = prompts.read(request_without_keys)
    assert found.keys == ()
    assert found.size_bytes > 0


def test_a_model_has_tokens_once_a_response_has_usage_or_a_replica_holds_prefixes() -> None:
    keys = keys_of_fleet("sluice", b"")
    index = KeyIndex()
    by_usage, by_prefixes = (
        ModelPrompts(("m", 1), keys, KeyIndex()),
        ModelPrompts(("m", 1), keys, index),
    )
    assert not by_usage.has_tokens
    by_usage.learn(None, Usage(completion_tokens=1))
    assert not by_usage.has_tokens
    by_usage.learn(None, Usage(prompt_tokens=1))
    assert by_usage.has_tokens
    assert not by_prefixes.has_tokens
    index.announce("r", KeyChanges([b"12345678"]))
    assert by_prefixes.has_tokens


def test_a_demand_has_the_tokens_of_the_prompt_and_of_its_prefix_at_each_replica(
    prompts: ModelPrompts,
) -> None:
    prompts.learn(RoutedPrompt(100 << 20), Usage(prompt_tokens=50 << 20))
    found = prompts.read(asked(text_input="x" * 10 * PIECE_BYTES))
    prompts.index.announce("a", KeyChanges(found.keys[:4]))
    prompts.index.announce("b", KeyChanges(found.keys[1:]))
    demand = prompts.demand(found, 0.0)
    assert demand.tokens == 5 * PIECE_BYTES
    assert demand.held == {"a": 2 * PIECE_BYTES}


def test_fleets_have_different_keys_with_and_without_a_secret() -> None:
    fleets = [("a", b""), ("b", b""), ("a", b"s" * 32), ("a", b"t" * 32)]
    found = {keys_of_fleet(*each).of_pin("kind", "m", "n") for each in fleets}
    assert len(found) == len(fleets)
    assert keys_of_fleet("a", b"").of_pin("k", "m", "n") == keys_of_fleet("a", b"").of_pin(
        "k", "m", "n"
    )


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_prompt_of_128_kib_is_read_in_a_millisecond(prompts: ModelPrompts, kind: str) -> None:
    text = "abcdefgh" * (1 << 14)
    messages = [
        {"role": "user", "content": text[start : start + 8192]}
        for start in range(0, len(text), 8192)
    ]
    request = asked(text_input=text) if kind == "text" else chat(*messages)
    took = []
    for _ in range(200):  # other processes share the caches of the processor
        began = time.thread_time()
        found = prompts.read(request)
        took.append(time.thread_time() - began)
    assert len(found.keys) >= 128
    assert min(took) < 0.001


def parsed(**members: Any) -> InferRequest:
    """A request whose members are known."""
    body = RequestBody(orjson.dumps(members), members)
    return InferRequest(model="m", inputs=(Tensor(REQUEST, Datatype.BYTES, (1,), body),))


def said(content: Any) -> InferRequest:
    """A chat of one message."""
    return parsed(messages=[{"role": "user", "content": content}])


WIDE = "\N{EURO SIGN}"


@pytest.mark.parametrize(
    "ask",
    [
        lambda text: asked(text_input=text),
        lambda text: asked(text_input=WIDE + text),
        lambda text: parsed(prompt=text),
        lambda text: parsed(prompt=WIDE + text),
        said,
        lambda text: said([{"type": "text", "text": text}] * 2),
        lambda text: said([{"type": "text", "text": text[:1024]}] * (len(text) // 1024)),
        lambda text: parsed(messages=[SYSTEM], tools=[{"description": text}]),
    ],
    ids=["text", "wide text", "prompt", "wide prompt", "message", "part", "parts", "tool"],
)
def test_of_a_long_prompt_the_beginning_is_read(
    prompts: ModelPrompts, ask: Callable[[str], InferRequest]
) -> None:
    medium, long = ask("abcdefgh" * (1 << 18)), ask("abcdefgh" * (1 << 22))
    tracemalloc.start()
    found = prompts.read(long)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 20 << 20  # no copy of the text; orjson takes 16 bytes for each byte
    assert 850 < len(found.keys) <= MOST_KEYS_OF_PROMPT
    assert common(found, prompts.read(medium)) == len(found.keys)
    size = sum(map(len, long.inputs[0].elements()))
    assert found.size_bytes == pytest.approx(size, rel=0.001)


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_a_chat_that_grows_beyond_the_limit_has_the_keys_of_its_beginning(
    prompts: ModelPrompts, size: int
) -> None:
    turns = [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Why? " * size}]}]
    before, after = parsed(messages=turns), parsed(messages=[*turns, TURN, *turns * 20])
    found = prompts.read(before)
    assert len(found.keys) >= 3
    assert common(found, prompts.read(after)) >= len(found.keys) - 1


def test_a_chat_that_is_cut_in_a_key_has_keys(prompts: ModelPrompts) -> None:
    for size in range((1 << 20) - 300, 1 << 20, 10):
        turns = [{"role": "user", "content": "a" * size}, TURN]
        assert len(prompts.read(parsed(messages=turns)).keys) >= MOST_KEYS_OF_PROMPT - 1


def test_a_deep_message_has_no_keys(prompts: ModelPrompts) -> None:
    deep: Any = "x"
    for _ in range(1020):
        deep = [deep]
    body = RequestBody(bytes(2 << 20), {"messages": [deep]})
    request = InferRequest(model="m", inputs=(Tensor(REQUEST, Datatype.BYTES, (1,), body),))
    assert prompts.read(request) == RoutedPrompt(2 << 20)
