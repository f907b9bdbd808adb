"""Chunks past vLLM's handlers are byte for byte those of the handlers, from the same outputs."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.messages import InferRequest, InferResponse
from tests.backends.vllm.conftest import Llama, ask, engine_marks, openai, strings
from tests.builders import settle, soon
from tests.serving import wait_until

pytestmark = engine_marks

CLOCK = "vllm.entrypoints.openai.chat_completion.serving.time.time"
QUESTION = [{"role": "user", "content": "Hi"}]
CHAT = ({"messages": QUESTION}, "chat/completions")
TEXT = ({"prompt": "Once"}, "completions")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LETTERS = 'ab \n\t\r"\\/\x00\x1f\x7fäß\u2028\u200d😀👩‍🚀한字🇫🇷é<tool_call>{}'
OUTSIDE = 60_000
"""A number that is no token of the model."""
RUNS = 25
OUTPUTS = "gateway_vllm_outputs"
TOTAL = "gateway_vllm_outputs_total"

Step = dict[str, Any]


class Reader:
    """Takes diverted deltas while it has room, as well as those that the instance yields."""

    def __init__(self, *, rooms: random.Random | None = None) -> None:
        self.found: list[InferResponse] = []
        self.put_count = 0
        self._rooms = rooms

    @property
    def has_room(self) -> bool:
        return self._rooms is None or self._rooms.random() < 0.7

    def put(self, response: InferResponse) -> None:
        assert not response.final
        self.found.append(response)
        self.put_count += 1


async def answered(
    llama: Llama, request: InferRequest, steps: Sequence[Step], reader: Reader, *, diverts: bool
) -> list[InferResponse]:
    """The responses if the engine makes these outputs; none of them is computed."""
    from vllm.v1.engine import EngineCoreOutput

    llm, added = llama.llm, []

    async def add(request: Any) -> None:
        added.append(request.request_id)

    async def read() -> None:
        asked = replace(request, sink=reader if diverts else None)
        async for _, answer in llama.instance.execute([asked]):
            assert isinstance(answer, InferResponse), answer
            reader.found.append(answer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine_core, "add_request_async", add)
        patch.setattr(CLOCK, lambda: 1.0)
        reading = asyncio.create_task(read())
        await asyncio.to_thread(wait_until, lambda: added, "the request is added")
        for step in steps:
            await settle()
            output = EngineCoreOutput(added[0], **step)
            llm.output_processor.process_outputs([output], time.monotonic())
        await soon(reading)
    return reader.found


def generated(llama: Llama, chance: random.Random) -> list[Step]:
    """Outputs of a few tokens each, some without a text; the last one has a reason."""
    from vllm.v1.engine import FinishReason

    text = "".join(chance.choices(LETTERS, k=chance.randrange(5, 60)))
    tokens = llama.llm.get_tokenizer().encode(text, add_special_tokens=False)
    for _ in range(chance.randrange(6)):
        tokens.insert(chance.randrange(len(tokens)), chance.choice([0, 1, 2, OUTSIDE, 300, 46000]))
    if chance.random() < 0.5:
        chance.shuffle(tokens)
    steps: list[Step] = []
    while tokens:
        count = chance.choice([1, 1, 1, 2, 3])
        steps.append({"new_token_ids": tokens[:count]})
        tokens = tokens[count:]
    reason = chance.choice([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
    stop = chance.choice([None, 2]) if reason is FinishReason.STOP else None
    steps[-1] |= {"finish_reason": reason, "stop_reason": stop}
    return steps


def outputs(responses: Sequence[InferResponse]) -> list[list[tuple[str, bytes]]]:
    return [[(each.name, bytes(each.raw())) for each in response.outputs] for response in responses]


def completion_tokens(responses: Sequence[InferResponse]) -> int:
    return sum(each.usage.completion_tokens for each in responses if each.usage is not None)


async def compare(llama: Llama, request: InferRequest, seed: int, *, slow: bool) -> int:
    """Answer a request both ways with the same outputs; the number of deltas that were diverted."""
    chance = random.Random(seed)
    steps = generated(llama, chance)
    reader = Reader(rooms=chance if slow else None)
    expected = await answered(llama, request, steps, Reader(), diverts=False)
    found = await answered(llama, request, steps, reader, diverts=True)
    assert outputs(found) == outputs(expected)
    assert [each.final for each in found] == [each.final for each in expected]
    assert completion_tokens(found) == completion_tokens(expected)
    assert [each.parameters for each in found] == [each.parameters for each in expected]
    return reader.put_count


@pytest.mark.parametrize("slow", [False, True], ids=["a reader", "a slow reader"])
@pytest.mark.parametrize(
    "members",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"stop": ["a ", "😀", "ol_c"]},
        {"stop": ["b"], "include_stop_str_in_output": True, "min_tokens": 3},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        {"echo": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("asked", [CHAT, TEXT], ids=["chat", "completions"])
async def test_chunks_are_those_of_vllms_handlers(
    llama: Llama, asked: tuple[dict[str, Any], str], members: dict[str, Any], slow: bool
) -> None:
    body, endpoint = asked
    request = replace(
        openai({**body, "stream": True, "max_tokens": 99, **members}, endpoint), id="a"
    )
    put = [await compare(llama, request, seed, slow=slow) for seed in range(RUNS)]
    assert sum(put) > RUNS


@pytest.mark.parametrize(
    ("members", "endpoint"),
    [
        (
            {
                "messages": QUESTION,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            "chat/completions",
        ),
        ({"messages": QUESTION, "tools": TOOLS}, "chat/completions"),
        ({"messages": QUESTION, "return_token_ids": True}, "chat/completions"),
        ({"prompt": "Once", "return_token_ids": True}, "completions"),
    ],
)
async def test_chunks_with_more_than_a_text_are_made_by_the_handlers(
    llama: Llama, members: dict[str, Any], endpoint: str
) -> None:
    request = replace(openai({**members, "stream": True, "max_tokens": 99}, endpoint), id="a")
    assert await compare(llama, request, 1, slow=False) == 0


@pytest.mark.parametrize("slow", [False, True], ids=["a reader", "a slow reader"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"stop": ["a ", "😀"]},
        {
            "return_finish_reason": True,
            "return_num_output_tokens": True,
            "return_num_input_tokens": True,
        },
    ],
)
async def test_texts_are_those_of_the_engines_outputs(
    llama: Llama, given: dict[str, Any], slow: bool
) -> None:
    request = ask("Once", stream=True, max_tokens=99, **given)
    put = [await compare(llama, request, seed, slow=slow) for seed in range(RUNS)]
    assert sum(put) > RUNS


async def test_a_request_with_log_probabilities_is_not_diverted(llama: Llama) -> None:
    request = ask("Once", stream=True, max_tokens=4, logprobs=1, return_logprobs=True)
    reader = Reader()
    async for _, answer in llama.instance.execute([replace(request, sink=reader)]):
        assert isinstance(answer, InferResponse)
        reader.found.append(answer)
    assert reader.put_count == 0
    assert all(strings(each, "logprobs") != ["null"] for each in reader.found)


async def test_the_engine_itself_diverts_all_but_the_first_and_the_last(llama: Llama) -> None:
    reader, before = Reader(), ways(llama)
    request = replace(ask("Once", stream=True, max_tokens=12, ignore_eos=True), sink=reader)
    async for _, answer in llama.instance.execute([request]):
        assert isinstance(answer, InferResponse)
        reader.found.append(answer)
    assert reader.put_count == 10
    assert completion_tokens(reader.found) == 12
    assert ways(llama) == {"diverted": before["diverted"] + 10, "vllm": before["vllm"] + 2}


def ways(llama: Llama) -> dict[str, float]:
    """The outputs that the metrics of the instance count, by their way."""
    (family,) = [each for each in llama.instance.metrics if each.name == OUTPUTS]
    return {each.labels["way"]: each.value for each in family.samples if each.name == TOTAL}


async def test_a_delta_that_cannot_be_put_fails_its_request_alone(llama: Llama) -> None:
    class Broken(Reader):
        def put(self, response: InferResponse) -> None:
            raise ZeroDivisionError

    request = replace(ask("Once", stream=True, max_tokens=50, ignore_eos=True), sink=Broken())
    with pytest.raises(ZeroDivisionError):
        async for _ in llama.instance.execute([request]):
            pass
    await llama.serves_on()
