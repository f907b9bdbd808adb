"""Outputs of the engine, generated or recorded, and the responses that they become."""

import asyncio
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from gateway.errors import InferenceError
from gateway.generation import TEXT_OUTPUT
from gateway.messages import InferRequest, InferResponse, response_of_text
from gateway.openai_contract import RESPONSE
from tests.backends.vllm.conftest import Llama, strings
from tests.builders import settle, soon

CLOCK = "vllm.entrypoints.openai.chat_completion.serving.time.time"
STOPS = ("a ", "😀", "ol_c", "é한")
"""Strings that generated texts often have, most of them in several tokens."""
PIECES = ("<tool_call>", "</think>", "👩‍🚀", "🇫🇷", "\u2028", "e\u0301", "\r\n", "\ufffd", *STOPS)
PLANES = ((0x20, 0x7F), (0x00, 0x100), (0x100, 0x3000), (0x3000, 0xD800), (0xE000, 0x110000))
"""Ranges of all code points but surrogates; one of each is as likely as one of another."""
OUTSIDE = 60_000
"""A number that is no token of the model."""

Step = dict[str, Any]


@dataclass(slots=True)
class Reader:
    """Takes diverted deltas while it has room, as well as those that the instance yields.

    `counts` are vLLM's statistics after each step, `error` is the message of the error that the
    instance yielded.
    """

    rooms: random.Random | None = None
    found: list[InferResponse] = field(default_factory=list)
    put_count: int = 0
    error: str = ""
    counts: list[Any] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        return self.rooms is None or self.rooms.random() < 0.7

    def put(self, response: InferResponse) -> None:
        assert not response.final
        self.found.append(response)
        self.put_count += 1

    def put_texts(self, name: str, texts: Sequence[bytes], tokens: Sequence[int]) -> None:
        for text, count in zip(texts, tokens, strict=True):
            self.put(response_of_text(name, text, count))

    def take(self, answer: InferResponse | InferenceError) -> None:
        """Take what the instance yields."""
        assert not self.error
        if isinstance(answer, InferenceError):
            self.error = answer.message
        else:
            self.found.append(answer)

    def count(self, step: Any, state: Any) -> None:
        """Note what vLLM has counted of a step and of its request."""
        gaps, waits = step.inter_token_latencies_iter, len(step.time_to_first_tokens_iter)
        of_request = state.stats.num_generation_tokens, state.stats.last_token_ts
        versions = [*state.weight_version_starts]
        self.counts.append((step.num_generation_tokens, gaps, waits, of_request, versions))

    async def read(self, llama: Llama, request: InferRequest) -> None:
        """Read all responses to a request whose deltas may be diverted."""
        async for _, answer in llama.instance.execute([replace(request, sink=self)]):
            self.take(answer)  # type: ignore[arg-type]  # an instance of LLMs has no notes


async def answered(
    llama: Llama,
    request: InferRequest,
    steps: Sequence[Step],
    reader: Reader,
    *,
    diverts: bool,
    hurry: random.Random | None = None,
) -> Reader:
    """Have a request answered by these outputs of the engine, which computes none of them.

    With `hurry` some steps follow the one before them within a turn of the loop.
    """
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.metrics.stats import IterationStats

    llm = llama.llm
    added: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def add(request: Any) -> None:
        added.set_result(request.request_id)

    async def read() -> None:
        asked = replace(request, sink=reader if diverts else None)
        async for _, answer in llama.instance.execute([asked]):
            reader.take(answer)  # type: ignore[arg-type]  # an instance of LLMs has no notes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine_core, "add_request_async", add)
        patch.setattr(CLOCK, lambda: 1.0)
        reading = asyncio.create_task(read())
        request_id = await soon(added)
        state = llm.output_processor.request_states[request_id]
        for at, step in enumerate(steps):
            if hurry is None or hurry.random() < 0.5:
                await settle()
            # A stop string takes the tokens behind it from the output.
            own = {**step, "new_token_ids": [*step["new_token_ids"]]}
            output, counts = EngineCoreOutput(request_id, **own), IterationStats()
            version = "old" if at < len(steps) // 2 else "new"
            llm.output_processor.process_outputs([output], float(at), counts, version)
            reader.count(counts, state)
        await soon(reading)
    return reader


async def recorded(llama: Llama, request: InferRequest) -> list[Step]:
    """The outputs that the engine makes for a request."""
    steps: list[Step] = []
    process = llama.llm.output_processor.process_outputs

    def note(outputs: Sequence[Any], *rest: Any, **named: Any) -> Any:
        for each in outputs:
            tokens = list(each.new_token_ids)
            reasons = {"finish_reason": each.finish_reason, "stop_reason": each.stop_reason}
            steps.append({"new_token_ids": tokens, **reasons})
        return process(outputs, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama.llm.output_processor, "process_outputs", note)
        await llama.answers(request)
    return steps


def generated(llama: Llama, chance: random.Random) -> list[Step]:
    """Outputs of up to three tokens each, some without a token or a text.

    Characters are of all planes, and whole, in a few tokens, or in a token for each byte. The last
    output has a reason.
    """
    from vllm.v1.engine import FinishReason

    tokens = _tokens(llama.llm.get_tokenizer(), _text(chance), chance)
    for _ in range(chance.randrange(6)):
        tokens.insert(chance.randrange(len(tokens)), chance.choice([0, 1, 2, OUTSIDE, 300, 46000]))
    if chance.random() < 0.25:
        chance.shuffle(tokens)
    steps: list[Step] = []
    while tokens:
        count = chance.choice([0, 1, 1, 1, 1, 2, 3])
        steps.append({"new_token_ids": tokens[:count]})
        tokens = tokens[count:]
    reason = chance.choice([*FinishReason])
    stop = chance.choice([None, 2]) if reason is FinishReason.STOP else None
    steps[-1] |= {"finish_reason": reason, "stop_reason": stop}
    return steps


def _text(chance: random.Random) -> str:
    pieces = [chr(chance.randrange(*chance.choice(PLANES))) for _ in range(chance.randrange(5, 40))]
    for piece in chance.choices(PIECES, k=chance.randrange(6)):
        pieces.insert(chance.randrange(len(pieces)), piece)
    return "".join(pieces)


def _tokens(tokenizer: Any, text: str, chance: random.Random) -> list[int]:
    if chance.random() < 0.5:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found
    known = _bytes_with_tokens(tokenizer)
    return [known[byte] for byte in text.encode() if byte in known]


@cache
def _bytes_with_tokens(tokenizer: Any) -> dict[int, int]:
    """The token of each byte that has one."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = tokenizer.get_vocab()
    names = bytes_to_unicode().items()
    return {byte: vocabulary[name] for byte, name in names if name in vocabulary}


def outputs(responses: Sequence[InferResponse]) -> list[list[tuple[str, bytes]]]:
    """The outputs of each response."""
    return [[(each.name, bytes(each.raw())) for each in response.outputs] for response in responses]


def text_of(responses: Sequence[InferResponse]) -> str:
    """The text of a stream of one sequence, in OpenAI's or in Triton's contract."""
    return "".join(text for response in responses for text in _texts(response))


def _texts(response: InferResponse) -> list[str]:
    if response.output(RESPONSE) is None:
        return strings(response, TEXT_OUTPUT)
    choices = json.loads(strings(response, RESPONSE)[0])["choices"]
    return [each.get("text") or each.get("delta", {}).get("content") or "" for each in choices]


def completion_tokens(responses: Sequence[InferResponse]) -> int:
    """The tokens of all responses."""
    return sum(each.usage.completion_tokens for each in responses if each.usage is not None)


async def compare(
    llama: Llama, request: InferRequest, steps: Sequence[Step], *, rooms: random.Random | None
) -> int:
    """Answer a request both ways with the same outputs; the number of deltas that were diverted."""
    expected = await answered(llama, request, steps, Reader(), diverts=False)
    found = await answered(llama, request, steps, Reader(rooms), diverts=True)
    assert outputs(found.found) == outputs(expected.found)
    assert found.error == expected.error
    assert found.counts == expected.counts
    for members in ("final", "parameters"):
        assert [getattr(each, members) for each in found.found] == [
            getattr(each, members) for each in expected.found
        ]
    assert completion_tokens(found.found) == completion_tokens(expected.found)
    return found.put_count


def options(**choices: Collection[Any]) -> list[dict[str, Any]]:
    """Every combination of these members, each also left out."""
    found: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        found += [{**each, name: value} for each in found for value in values]
    return found
