"""The contract of Triton's vLLM backend, from one real engine."""

import asyncio
import base64
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.observability.receipt import Receipt
from gateway.tensor import Datatype, Tensor
from tests.backends.vllm.conftest import (
    ANSWER,
    CONTEXT,
    QUESTION,
    Llama,
    ask,
    engine_marks,
    numbers,
    openai,
    strings,
)
from tests.builders import soon

pytestmark = engine_marks

GREEDY = {"temperature": 0, "max_tokens": 16}
ENDLESS = {"temperature": 0, "max_tokens": CONTEXT, "ignore_eos": True}
FLAGS = (
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
)


async def refusal(llama: Llama, request: InferRequest) -> str:
    with pytest.raises(InferenceError) as caught:
        await llama.answers(request)
    assert caught.value.code is Code.INVALID_ARG, caught.value
    return caught.value.message


class TestText:
    async def test_one_response_has_prompt_and_completion(self, llama: Llama) -> None:
        (response,) = await llama.answers(ask(**GREEDY))
        assert strings(response, "text_output") == [QUESTION + ANSWER]
        assert response.usage is not None
        assert response.usage.prompt_tokens == 16
        assert response.usage.completion_tokens == 8
        assert response.usage.finish_reason == "stop"

    @pytest.mark.parametrize("is_openai", [False, True], ids=["text", "openai"])
    async def test_only_a_request_with_a_receipt_has_the_engines_times(
        self, llama: Llama, is_openai: bool
    ) -> None:
        members = {"messages": [{"role": "user", "content": "x"}], **GREEDY}
        request = openai(members) if is_openai else ask(**GREEDY)
        *_, plain = await llama.answers(request)
        assert plain.engine is None
        *_, timed = await llama.answers(replace(request, receipt=Receipt(1, 1)))
        assert timed.engine is not None
        assert 0 < timed.engine.queued_ns <= timed.engine.last_token_ns

    async def test_the_prompt_can_be_excluded(self, llama: Llama) -> None:
        assert await llama.say(ask(exclude_input_in_output=True, **GREEDY)) == ANSWER

    async def test_a_stream_is_the_same_text_in_parts(self, llama: Llama) -> None:
        responses = await llama.answers(ask(stream=True, **GREEDY))
        assert len(responses) > 1
        assert "".join(strings(each, "text_output")[0] for each in responses) == ANSWER
        usages = [each.usage for each in responses if each.usage is not None]
        assert [usage.prompt_tokens for usage in usages] == [16] + [0] * (len(usages) - 1)
        assert sum(usage.completion_tokens for usage in usages) == 8
        assert [usage.finish_reason for usage in usages][-1] == "stop"

    async def test_a_stream_has_one_token_per_response(self, llama: Llama) -> None:
        responses = await llama.answers(
            ask("The", stream=True, return_num_output_tokens=True, ignore_eos=True, **GREEDY)
        )
        assert sum(numbers(each, "num_output_tokens")[0] for each in responses) == 16
        assert len(responses) > 8  # merged only if this test was slower than the engine

    async def test_a_conversation_is_put_into_the_models_template(self, llama: Llama) -> None:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        template = "<|im_start|>system\nYou are a helpful AI "
        assert await llama.say(ask(None, messages=messages, **GREEDY)) == ANSWER
        echoed = await llama.say(
            ask(None, messages=messages, exclude_input_in_output=False, **GREEDY)
        )
        assert echoed.startswith(template)
        assert "named SmolLM, trained by " in echoed
        assert echoed.endswith(QUESTION + ANSWER)

    async def test_the_tensor_of_sampling_parameters_replaces_those_of_the_request(
        self, llama: Llama
    ) -> None:
        sampling = {"temperature": "0", "max_tokens": "2", "ignore_eos": "false"}
        request = ask(max_tokens="rubbish", sampling_parameters=sampling, stream=True)
        assert await llama.say(request) == "The capital"

    async def test_a_stop_string_ends_the_text_before_it(self, llama: Llama) -> None:
        for stream in (False, True):
            request = ask(stop=[" France"], exclude_input_in_output=True, stream=stream, **GREEDY)
            assert await llama.say(request) == "The capital of"

    async def test_the_same_seed_says_the_same(self, llama: Llama) -> None:
        async def say(seed: int) -> str:
            return await llama.say(ask("Once upon", temperature=1.5, seed=seed, max_tokens=12))

        assert await say(1) == await say(1) != await say(2)

    async def test_two_sequences_keep_their_places_in_a_stream(self, llama: Llama) -> None:
        sampling = {"n": 2, "temperature": 1.5, "seed": 5, "max_tokens": 8, "ignore_eos": True}
        whole = await llama.answers(ask(exclude_input_in_output=True, **sampling))
        parts = await llama.answers(ask(stream=True, return_finish_reason=True, **sampling))
        texts = [strings(part, "text_output") for part in parts]
        joined = ["".join(column) for column in zip(*texts, strict=True)]
        assert joined == strings(whole[0], "text_output")
        assert len(set(joined)) == 2
        assert strings(parts[-1], "finish_reason") == ["length", "length"]

    @pytest.mark.parametrize(
        ("constraint", "allowed"),
        [
            ({"choice": ["Yes", "No"]}, {"Yes", "No"}),
            ('{"choice": ["Yes", "No"]}', {"Yes", "No"}),
            ({"regex": "[ab]{3}"}, {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
            ({"json": {"enum": [17]}}, {"17"}),
        ],
    )
    async def test_a_constraint_is_kept(
        self, llama: Llama, constraint: Any, allowed: set[str]
    ) -> None:
        request = ask(structured_outputs=constraint, exclude_input_in_output=True, **GREEDY)
        assert await llama.say(request) in allowed


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("stream", [False, True])
class TestOptionalOutputs:
    """Triton's own matrix of flags."""

    async def test_outputs_come_only_when_asked_for(
        self, llama: Llama, stream: bool, logprobs: int | None
    ) -> None:
        short = {**GREEDY, "max_tokens": 3}
        sampling = short if logprobs is None else {**short, "logprobs": logprobs}
        for asked in (*FLAGS, None):
            flags = {f"return_{name}": name == asked for name in FLAGS}
            for response in await llama.answers(ask(stream=stream, **flags, **sampling)):
                names = [output.name for output in response.outputs]
                assert names == ["text_output", *([asked] if asked else [])]

    async def test_they_tell_about_each_response(
        self, llama: Llama, stream: bool, logprobs: int | None
    ) -> None:
        sampling = {} if logprobs is None else {"logprobs": logprobs}
        flags = {f"return_{name}": True for name in FLAGS}
        responses = await llama.answers(
            ask(stream=stream, ignore_eos=True, **flags, **sampling, **GREEDY)
        )
        reasons = [strings(each, "finish_reason")[0] for each in responses]
        assert reasons == ["None"] * (len(responses) - 1) + ["length"]
        assert {numbers(each, "num_input_tokens")[0] for each in responses} == {16}
        assert sum(numbers(each, "num_output_tokens")[0] for each in responses) == 16
        self.check_logprobs(responses, logprobs)

    def check_logprobs(self, responses: list[InferResponse], logprobs: int | None) -> None:
        said = ""
        for response in responses:
            told = json.loads(strings(response, "logprobs")[0])
            if logprobs is None:
                assert told is None
                continue
            assert len(told) == numbers(response, "num_output_tokens")[0]
            for token in told:
                assert 1 <= len(token) <= logprobs + 1
                (best,) = [each for each in token.values() if each["rank"] == 1]
                said += best["decoded_token"]
        if logprobs is not None:
            assert said.startswith(ANSWER)
            totals = [numbers(each, "cumulative_logprob")[0] for each in responses]
            assert totals == sorted(set(totals), reverse=True)


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
LONG = "word " * (2 * CONTEXT)
REFUSED = {
    "no prompt": (ask(None), "got neither"),
    "two prompts": (ask(messages=[{"role": "user", "content": "x"}]), "got both"),
    "an empty prompt": (ask(""), "prompt cannot be empty"),
    "a long prompt": (ask(LONG), f"is {CONTEXT} tokens"),
    "an endless prompt": (ask(LONG * 200), f"is {CONTEXT} tokens"),
    "a prompt with the length of the context": (ask("a" * 6 + " b" * CONTEXT), str(CONTEXT)),
    "a long conversation": (
        ask(None, messages=[{"role": "user", "content": LONG}]),
        f"is {CONTEXT} tokens",
    ),
    "an empty conversation": (ask(None, messages=[]), "at least one message"),
    "a conversation of numbers": (ask(None, messages=[1]), "valid dictionary (at messages.0)"),
    "an image for a model without eyes": (ask(image=[base64.b64encode(PNG)]), "text-only"),
    "an image that is none": (ask(image=[b"QUFB"]), "no image of a known format"),
    "an image that is no base64": (ask(image=[b"!"]), "not base64"),
    "an image beside a conversation": (
        ask(None, messages=[{"role": "user", "content": "x"}], image=[b"QUFB"]),
        "'image' goes with 'text_input'",
    ),
    "an embedding": (
        ask(None, embedding_request={"input": "x"}),
        "Model llama does not support 'embed' request",
    ),
    "a stream with its prompt": (ask(stream=True, exclude_input_in_output=False), "not allowed"),
    "an unknown parameter": (ask(max_tokns=1), "did you mean 'max_tokens'"),
    "no tokens": (ask(max_tokens=0), "max_tokens must be at least 1"),
    "negative tokens": (ask(max_tokens=-1), "max_tokens must be at least 1"),
    "tokens beyond the context": (ask(max_tokens=CONTEXT + 1), f"context of {CONTEXT} tokens"),
    "fewer tokens than the least": (ask(max_tokens=2, min_tokens=3), "min_tokens must be less"),
    "more than there is room for": (ask(max_tokens=None, min_tokens=10**9), "min_tokens"),
    "a million sequences": (ask(n=10**6), "more than the 64"),
    "greedy sequences": (ask(n=2, temperature=0), "n must be 1 when using greedy sampling"),
    "a cold temperature": (ask(temperature=-1), "non-negative"),
    "no temperature": (ask(temperature="nan"), "a finite number"),
    "no probability": (ask(top_p=0), "top_p must be in"),
    "too many logprobs": (ask(logprobs=21), "greater than max allowed: 20"),
    "all logprobs": (ask(logprobs=-1), "greater than max allowed: 20"),
    "a bias outside": (ask(logit_bias={"99999999": 1}), "out-of-vocab"),
    "a stop outside": (ask(stop_token_ids=[-1]), "out-of-vocab"),
    "nothing allowed": (ask(allowed_token_ids=[]), "empty"),
    "only the outside allowed": (ask(allowed_token_ids=[10**6]), "out-of-vocab"),
    "an empty stop": (ask(stop=""), "stop cannot contain an empty string"),
    "a bad word of nothing": (ask(bad_words=["a", ""]), "bad_words cannot contain"),
    "an adapter that is none": (ask(lora_name="x"), "LoRA x is not supported"),
    "half a regex": (ask(structured_outputs={"regex": "["}), "unclosed character class"),
    "a deep regex": (ask(structured_outputs={"regex": "(" * 5000 + "a" + ")" * 5000}), "regex"),
    "an unknown type": (ask(structured_outputs={"json": {"type": 5}}), "type must be a string"),
    "half a schema": (ask(structured_outputs={"json": "{"}), "Invalid JSON grammar"),
    "a dangling schema": (ask(structured_outputs={"json": {"$ref": "#/x"}}), "does not exist"),
    "no grammar": (ask(structured_outputs={"grammar": "no grammar"}), "Invalid grammar"),
    "no choice": (ask(structured_outputs={"choice": []}), "cannot be an empty list"),
    "two constraints": (ask(structured_outputs={"regex": "a", "json": {}}), "only use one kind"),
}


def deep_schema() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


class TestBadInput:
    @pytest.mark.parametrize("name", REFUSED)
    async def test_a_mistake_is_refused_and_the_engine_serves_on(
        self, llama: Llama, name: str
    ) -> None:
        request, said = REFUSED[name]
        message = await refusal(llama, request)
        assert said in message
        assert message.startswith("Error generating stream: ") or "LoRA" in message
        assert "Traceback" not in message
        assert "site-packages" not in message
        await llama.serves_on()

    async def test_a_schema_may_not_nest_without_end(self, llama: Llama) -> None:
        request = ask(structured_outputs={"json": deep_schema()})
        assert "nested too deeply" in await refusal(llama, request)

    async def test_a_prompt_must_be_utf_8(self, llama: Llama) -> None:
        wrong = Tensor("text_input", Datatype.BYTES, (1,), (b"\xff",))
        request = InferRequest(model="llama", inputs=(wrong,))
        assert "not valid UTF-8" in await refusal(llama, request)

    @pytest.mark.parametrize(
        "odd",
        [
            {"bad_words": [""], "stop_words": [""]},
            {"max_tokens": CONTEXT, "stop": "."},
            {"max_tokens": None, "stop": "."},
            {"top_k": 2**40},
            {"seed": -(2**63), "temperature": 1.0},
            {"repetition_penalty": 1e300},
            {"logit_bias": {"5": 1e300}},
            {"stop": [f"zz{n}" for n in range(64)]},
            {"detokenize": False},
            {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}},
            {"repetition_detection": {"max_pattern_size": 10**15, "min_count": 10**15}},
        ],
        ids=lambda odd: next(iter(odd)),
    )
    async def test_the_unusual_is_served(self, llama: Llama, odd: dict[str, Any]) -> None:
        assert await llama.answers(ask(**{"max_tokens": 3, "temperature": 0} | odd))
        await llama.serves_on()


class TestLeaving:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_closing_frees_the_request_at_once(self, llama: Llama, stream: bool) -> None:
        await llama.running(0)
        before = llama.metric("vllm:generation_tokens_total"), sum(llama.wasted)
        execution = llama.instance.execute([ask(stream=stream, **ENDLESS)])
        read = 0
        if stream:
            _, answer = await anext(execution)
            assert isinstance(answer, InferResponse)
            read = (answer.usage or Usage()).completion_tokens
        else:
            first = asyncio.create_task(anext(execution))
            await llama.running(1)
            first.cancel()
            await asyncio.wait([first])
        began = time.monotonic()
        await soon(execution.aclose())
        await llama.running(0)
        assert time.monotonic() - began < 1
        made = llama.metric("vllm:generation_tokens_total") - before[0]
        assert sum(llama.wasted) - before[1] == made - read

    async def test_others_are_not_disturbed(self, llama: Llama) -> None:
        leaving = llama.instance.execute([ask(stream=True, **ENDLESS)])
        await anext(leaving)
        staying = asyncio.create_task(llama.say(ask(exclude_input_in_output=True, **GREEDY)))
        await soon(leaving.aclose())
        assert await soon(staying) == ANSWER

    async def test_a_request_can_be_closed_before_it_has_begun(self, llama: Llama) -> None:
        await llama.instance.execute([ask(**GREEDY)]).aclose()
        await llama.running(0)


class TestMetrics:
    async def test_vllms_own_series_have_tritons_labels_as_well(self, llama: Llama) -> None:
        await llama.say(ask(**GREEDY))
        families = {family.name: family for family in llama.instance.metrics}
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            (sample,) = families[f"vllm:{name}"].samples
            labels = {"model_name": "llama", "engine": "0", "model": "llama", "version": "1"}
            assert sample.labels == labels

    async def test_tritons_name_counts_every_token_but_the_first(self, llama: Llama) -> None:
        name = "vllm:time_per_output_token_seconds_count"
        before = llama.metric(name), llama.metric("vllm:generation_tokens_total")
        await llama.say(ask(stream=True, **GREEDY))
        await llama.running(0)
        assert llama.metric("vllm:generation_tokens_total") - before[1] == 8
        assert llama.metric(name) - before[0] == 7


async def test_many_requests_are_in_flight_at_once(llama: Llama) -> None:
    said = await asyncio.gather(
        *(
            llama.say(ask(stream=n % 2 == 0, exclude_input_in_output=True, **GREEDY))
            for n in range(64)
        )
    )
    assert set(said) == {ANSWER}
