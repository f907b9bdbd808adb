"""Faults of diverted streams: each of them touches one stream, and half characters none."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.messages import InferRequest, InferResponse
from tests.backends.vllm.conftest import ANSWER, Llama, ask, engine_marks, openai
from tests.backends.vllm.serving.outputs import OUTSIDE, Reader, text_of
from tests.builders import soon

pytestmark = engine_marks

OTHERS = 3
STORY_TOKENS = 15
STORY = {"prompt": "Once", "stream": True, "max_tokens": STORY_TOKENS, "ignore_eos": True}
CHARACTERS = "😀é👩\u200d🚀"
"""The engine writes nothing else; the first and the last have several tokens."""
DRAWING = {
    "messages": [{"role": "user", "content": "Draw."}],
    "structured_outputs": {"regex": f"({CHARACTERS})+"},
    "temperature": 0,
}
CUTS = range(1, 13)
"""Numbers of tokens, some of which end within a character."""
HALF = "\N{REPLACEMENT CHARACTER}"


async def test_a_delta_that_cannot_be_put_fails_its_request_alone(llama: Llama) -> None:
    class Broken(Reader):
        def put(self, response: InferResponse) -> None:
            raise ZeroDivisionError

    request = ask("Once", stream=True, max_tokens=STORY_TOKENS, ignore_eos=True)
    broken = asyncio.create_task(Broken().read(llama, request))
    assert await answers(llama) == [ANSWER] * OTHERS
    with pytest.raises(ZeroDivisionError):
        await soon(broken)
    assert not llama.llm.output_processor.request_states


@pytest.mark.parametrize("token", [OUTSIDE, -1, 1 << 70, "a", 1.5, None], ids=repr)
async def test_malformed_outputs_touch_one_stream(llama: Llama, token: object) -> None:
    """Each step also has outputs for a request that the engine never had, and for ended ones."""
    reader = Reader()
    await answers(llama)  # the first diverted request replaces the processor's function
    with malformed(llama, token) as count:
        broken = asyncio.create_task(reader.read(llama, openai(STORY, "completions")))
        assert await answers(llama) == [ANSWER] * OTHERS
        await soon(broken)
    assert len(count) == STORY_TOKENS
    assert reader.put_count
    assert reader.error or reader.found[-1].final
    assert not llama.llm.output_processor.request_states


async def test_no_half_of_a_character_is_in_a_stream(llama: Llama) -> None:
    """Texts are cut at every token; the diverted ones are those of vLLM's handlers."""
    expected = await asyncio.gather(*(drawn(llama, count) for count in CUTS))
    halves = [whole.endswith(HALF) for _, whole in expected]
    assert 0 < sum(halves) < len(halves)
    bodies = [{**DRAWING, "stream": True, "max_tokens": count} for count in CUTS]
    for asked in ([*map(openai, bodies)], [ask(None, **body) for body in bodies]):
        readers = [Reader() for _ in CUTS]
        await read_all(llama, readers, asked)
        assert [text_of(each.found) for each in readers] == [text for text, _ in expected]
        assert any(each.put_count > 1 for each in readers)


async def drawn(llama: Llama, count: int) -> tuple[str, str]:
    """The text that vLLM's handler sends of this many tokens, and the text of the tokens."""
    body = {**DRAWING, "stream": True, "max_tokens": count, "return_token_ids": True}
    chunks = await llama.chunks(openai(body))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    whole: str = llama.llm.get_tokenizer().decode(tokens)
    assert HALF not in text
    assert whole.rstrip(HALF) == text
    return text, whole


@contextmanager
def malformed(llama: Llama, token: object) -> Iterator[list[object]]:
    """In this block each output for the story has this token, and others have no request."""
    from vllm.v1.engine import EngineCoreOutput

    processor, ended, count = llama.llm.output_processor, ["never"], list[object]()
    process = processor.process_outputs

    def tamper(outputs: list[Any], *rest: Any, **named: Any) -> Any:
        more = [EngineCoreOutput(name, [5]) for name in ended]
        for each in outputs:
            state = processor.request_states.get(each.request_id)
            if state is not None and state.max_tokens_param == STORY_TOKENS:
                each.new_token_ids = [token]
                count.append(each)
            if each.finish_reason is not None:
                ended.append(each.request_id)
        return process([*more, *outputs, *more], *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "process_outputs", tamper)
        yield count


async def answers(llama: Llama) -> list[str]:
    """The texts of several diverted streams, whose answer is known."""
    requests = [ask(stream=True, temperature=0, max_tokens=16) for _ in range(OTHERS)]
    readers = [Reader() for _ in requests]
    await read_all(llama, readers, requests)
    assert all(reader.put_count for reader in readers)
    return [text_of(reader.found) for reader in readers]


async def read_all(
    llama: Llama, readers: Sequence[Reader], requests: Sequence[InferRequest]
) -> None:
    """Have each reader read the responses to one of these concurrent requests."""
    pairs = zip(readers, requests, strict=True)
    await asyncio.gather(*(reader.read(llama, request) for reader, request in pairs))
