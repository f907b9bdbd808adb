"""No bad prompt ends the real engine: the client reads what is wrong, and where."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients import text
from tests.e2e.llama import QUESTION, Llama, error_of, every_engine, shipped_arguments
from tests.e2e.streams import STREAM, hear
from tests.serving import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

CONTEXT = int(shipped_arguments()["max_model_len"])
SAID = {"text_input": "The sky is", "max_tokens": 4, "temperature": 0}
LONG = "word " * (2 * CONTEXT)
OUTSIDE = 10_000_000
LEAKS = ("Traceback", "site-packages", ".cache", str(ROOT), str(Path.home()), "/usr/", "/tmp")


def said(**more: Any) -> dict[str, Any]:
    return {**SAID, **more}


def shaped(**constraint: Any) -> dict[str, Any]:
    return said(structured_outputs=constraint)


def told(messages: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 4, "temperature": 0}


PROMPTS = {
    "nothing at all": ({}, "'text_input'"),
    "a text and a conversation": (said(messages=QUESTION), "'messages'"),
    "an empty text": (said(text_input=""), "prompt"),
    "two texts": (said(text_input=["a", "b"]), "'text_input'"),
    "a text longer than the context": (said(text_input=LONG), str(CONTEXT)),
    "an image that is none": (said(image="bm8gaW1hZ2U="), "'image'"),
    "a conversation that is a text": (told("hello"), "'messages'"),
    "a conversation that is an object": (told(QUESTION[0]), "'messages'"),
    "a conversation of numbers": (told([1, 2]), "'messages'"),
    "an empty conversation": (told([]), "'messages'"),
    "a message without a role": (told([{"content": "hi"}]), "'messages'"),
    "a message whose role is a number": (told([{"role": 1, "content": "hi"}]), "'messages'"),
    "a message whose content is a number": (told([{"role": "user", "content": 5}]), "'messages'"),
    "two thousand messages": (told(QUESTION * 2_000), str(CONTEXT)),
    "an embedding of a chat model": ({"embedding_request": {"input": "x"}}, "embed"),
}
PARAMETERS = {
    "an unknown name": (said(max_toknes=4), "'max_tokens'"),
    "no tokens": (said(max_tokens=0), "max_tokens"),
    "fewer than no tokens": (said(max_tokens=-1), "max_tokens"),
    "more tokens than the context": (said(max_tokens=CONTEXT + 1), "max_tokens"),
    "absurdly many tokens": (said(max_tokens=10**30), "max_tokens"),
    "half a token": (said(max_tokens=1.5), "max_tokens"),
    "tokens in words": (said(max_tokens="many"), "max_tokens"),
    "a list of limits": (said(max_tokens=[4]), "max_tokens"),
    "a million sequences": (said(n=1_000_000), "n=1000000"),
    "no sequence": (said(n=0), "n must be"),
    "a temperature that is no number": (said(temperature="NaN"), "temperature"),
    "an infinite temperature": (said(temperature="inf"), "temperature"),
    "a negative temperature": (said(temperature=-1), "temperature"),
    "more than all the probability": (said(top_p=2), "top_p"),
    "a hundred thousand stop strings": (said(stop=[str(n) for n in range(100_000)]), "'stop'"),
    "a stop string of a megabyte": (said(stop="x" * 1_000_000), "'stop'"),
    "an empty stop string": (said(stop=[""]), "stop"),
    "a biased token outside": (said(logit_bias={str(OUTSIDE): 1}), "logit_bias"),
    "a biased word": (said(logit_bias={"sky": 1}), "logit_bias"),
    "an allowed token outside": (said(allowed_token_ids=[OUTSIDE]), "allowed_token_ids"),
    "more allowed tokens than there are": (
        said(allowed_token_ids=[1] * 300_000),
        "'allowed_token_ids'",
    ),
    "no allowed token": (said(allowed_token_ids=[]), "allowed_token_ids"),
    "a stop token outside": (said(stop_token_ids=[-1]), "stop_token_ids"),
    "too many logprobs": (said(logprobs=100_000), "logprobs"),
    "an adapter": (said(lora_name="x"), "LoRA"),
    "sampling in no JSON": (said(sampling_parameters="{oops"), "'sampling_parameters'"),
    "sampling in a list": (said(sampling_parameters="[1]"), "'sampling_parameters'"),
    "a transfer that is a text": (
        said(extra_args={"kv_transfer_params": "x"}),
        "'kv_transfer_params'",
    ),
    "the engine's own field": (said(output_kind=1), "'output_kind'"),
}
CONSTRAINTS = {
    "none": (shaped(), "structured outputs"),
    "a text": (said(structured_outputs="oops"), "structured_outputs"),
    "two at once": (shaped(regex="a", choice=["b"]), "structured outputs"),
    "an unknown one": (shaped(rejex="a"), "structured_outputs"),
    "an open bracket": (shaped(regex="([a-z"), "regex"),
    "a look-ahead": (shaped(regex="(?=a)b"), "regex"),
    "three thousand brackets": (shaped(regex="(" * 3000 + "a" + ")" * 3000), "regex"),
    "a schema that is no JSON": (shaped(json="{oops"), "JSON"),
    "a schema that is a number": (shaped(json=5), "structured_outputs"),
    "an unknown type": (shaped(json={"type": "nonsense"}), "nonsense"),
    "a reference to nowhere": (shaped(json={"$ref": "#/nowhere"}), "/nowhere"),
    "a reference to itself": (shaped(json={"$ref": "#"}), "structured_outputs"),
    "a schema nothing can fit": (
        shaped(json={"type": "integer", "minimum": 2, "maximum": 1}),
        "minimum",
    ),
    "an open grammar": (shaped(grammar="root ::= ("), "grammar"),
    "a grammar without end": (shaped(grammar="root ::= root"), "structured_outputs"),
    "no choice": (shaped(choice=[]), "hoice"),
    "a tag that is no JSON": (shaped(structural_tag="oops"), "grammar"),
}
LONG_PATTERN = {"type": "string", "pattern": "^[a-z]{1,10000}$"}
SLOW = {"type": "string", "pattern": "^(.{1,8}){1,8}$"}
"""The engine computes for seconds what this means."""

REFUSED = {
    f"{kind}: {name}": case
    for kind, cases in (
        *(("prompt", PROMPTS), ("parameter", PARAMETERS), ("constraint", CONSTRAINTS)),
    )
    for name, case in cases.items()
}
REFUSED_BY_GENAI = {
    "prompt: an image that is none": (501, "'image'"),
    "prompt: an embedding of a chat model": (501, "embed"),
    "parameter: a million sequences": (400, "'n' is 1000000"),
    "parameter: no sequence": (400, "'n' is 0"),
    "parameter: a biased token outside": (501, "logit_bias"),
    "parameter: a biased word": (501, "logit_bias"),
    "parameter: an allowed token outside": (501, "allowed_token_ids"),
    "parameter: more allowed tokens than there are": (501, "'allowed_token_ids'"),
    "parameter: no allowed token": (501, "allowed_token_ids"),
    "parameter: too many logprobs": (501, "logprobs"),
    "parameter: an adapter": (501, "'lora_name'"),
    "parameter: a transfer that is a text": (501, "'extra_args'"),
    "constraint: none": (400, "'structured_outputs'"),
    "constraint: two at once": (400, "'structured_outputs'"),
    "constraint: an unknown one": (501, "structured_outputs"),
    "constraint: a reference to itself": (400, "fitted by no text"),
    "constraint: a grammar without end": (400, "fitted by no text"),
    "constraint: a tag that is no JSON": (501, "'structural_tag'"),
    "an expression of huge repetition": (400, "states, expected at most"),
    "every token biased": (501, "logit_bias"),
    "n=1000000": (400, "'n' is 1000000"),
}
"""Refusals of OpenVINO GenAI with another status or in other words."""
WRONG_JSON = {
    "a number as text": (said(text_input=5), "non-string"),
    "null as text": (said(text_input=None), "non-string"),
    "a text as a truth": (said(stream="true"), "non-boolean"),
    "a number as a truth": (said(return_finish_reason=1), "non-boolean"),
    "parameters that are a text": (said(parameters="max_tokens"), "'parameters'"),
    "an id that is a number": (said(id=5), "'id'"),
}
ODD = {
    "a role nobody has heard of": told([{"role": "king", "content": "hi"}]),
    "tokens up to the context": said(max_tokens=CONTEXT, stop=["."]),
    "special tokens as text": said(text_input="<|im_start|>" * 20),
    "zero bytes": said(text_input="\0\0"),
    "the largest seed": said(temperature=1, seed=2**63 - 1),
    "a choice of thousands": shaped(choice=[f"choice {number}" for number in range(2000)]),
}
ODD_FOR_VLLM = {
    "an expression of huge repetition": shaped(regex="((a{1,1000}){1,1000}){1,1000}"),
    "every token biased": said(logit_bias={str(token): 1.0 for token in range(40_000)}),
}


@every_engine
@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_request_is_refused_in_words_that_name_what_is_wrong(
    llama: Llama, engine: str, case: str
) -> None:
    members, word = REFUSED[case]
    status, word = expected(engine, case, word)
    assert_refused(llama, members, word, status=status)
    llama.serves_on()


def test_a_schema_that_takes_vllm_long_to_prepare_is_refused(llama: Llama) -> None:
    assert_refused(llama, shaped(json=LONG_PATTERN), "takes too long to prepare", status=400)
    llama.serves_on()


@every_engine
@pytest.mark.parametrize("case", WRONG_JSON)
def test_json_of_the_wrong_type_is_refused_as_triton_does(llama: Llama, case: str) -> None:
    assert_refused(llama, *WRONG_JSON[case], status=500)
    llama.serves_on()


@every_engine
@pytest.mark.parametrize("case", ODD)
def test_an_odd_request_is_answered(llama: Llama, case: str) -> None:
    assert "text_output" in llama.generate(**ODD[case])
    llama.serves_on()


@every_engine
@pytest.mark.parametrize("case", ODD_FOR_VLLM)
def test_an_odd_request_is_answered_or_refused_by_the_limits_of_its_engine(
    llama: Llama, engine: str, case: str
) -> None:
    if engine == "vllm":
        assert "text_output" in llama.generate(**ODD_FOR_VLLM[case])
    else:
        status, word = REFUSED_BY_GENAI[case]
        assert_refused(llama, ODD_FOR_VLLM[case], word, status=status)
    llama.serves_on()


def test_a_schema_that_takes_long_keeps_no_other_waiting(llama: Llama) -> None:
    with ThreadPoolExecutor(1) as beside:
        slow = beside.submit(llama.generate, **shaped(json=SLOW))
        time.sleep(0.2)
        assert llama.generate(**shaped(json={"type": "integer"}))["text_output"]
        assert not slow.done()
        assert slow.result()["text_output"]


@every_engine
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("inputs", "parameters", "word"),
    [
        ([], {}, "'text_input'"),
        ([text("text_input", b"\xff\xfe")], {}, "'text_input' is not valid UTF-8"),
        ([text("text_input", b"")], {}, "prompt"),
        ([text("text_input", "a"), text("messages", "[]")], {}, "'messages'"),
        ([text("text_input", "a", "b")], {}, "'text_input'"),
        ([text("text_input", "a"), text("no_such_input", "b")], {}, "'no_such_input'"),
        ([text("messages", b"\xff")], {}, "'messages' is not valid JSON"),
        ([text("messages", "[{}]")], {}, "'messages'"),
        ([text("text_input", "a")], {"temperature": math.nan}, "temperature"),
        ([text("text_input", "a")], {"max_tokens": 0}, "max_tokens"),
        ([text("text_input", "a")], {"max_toknes": 1}, "'max_tokens'"),
        (
            [text("text_input", "a"), text("sampling_parameters", b"\xff")],
            {},
            "'sampling_parameters' is not valid JSON",
        ),
        (
            [text("text_input", "a"), text("sampling_parameters", json.dumps({"n": 10**6}))],
            {},
            "n=1000000",
        ),
    ],
)
def test_a_bad_request_is_one_message_on_a_grpc_stream(
    llama: Llama,
    engine: str,
    inputs: Any,
    parameters: Any,
    word: str,
    stream: bool,
) -> None:
    heard = hear(llama.server, *inputs, *([STREAM] if stream else []), parameters=parameters)
    assert heard.results == []
    (error,) = heard.errors
    assert_clear({"error": error.message()}, expected(engine, word, word)[1])
    llama.serves_on()


def expected(engine: str, case: str, word: str) -> tuple[int, str]:
    """The status of a refusal, and a word of it."""
    return (400, word) if engine == "vllm" else REFUSED_BY_GENAI.get(case, (400, word))


def assert_refused(llama: Llama, members: Any, word: str, *, status: int) -> None:
    """Both ways to ask refuse it before they send anything."""
    for path in ("/generate", "/generate_stream"):
        answer = llama.post(path, members)
        assert answer.status_code == status, answer.text
        assert_clear(error_of(answer), word)


def assert_clear(answer: Any, word: str) -> None:
    """An error says what is wrong, and nothing about the host."""
    assert answer.keys() == {"error"}
    assert word in answer["error"]
    assert [leak for leak in LEAKS if leak in answer["error"]] == []
