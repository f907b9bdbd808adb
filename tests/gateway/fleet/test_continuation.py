"""Texts whose replica is lost: which are continued, by which request, and how the parts join."""

import tracemalloc
from dataclasses import replace
from typing import Any

import orjson
import pytest

from gateway.errors import InferenceError
from gateway.fleet.continuable import NotContinued
from gateway.fleet.continuation import SentText
from gateway.messages import InferRequest, InferResponse, SequenceTag, Usage
from gateway.tensor import text_tensor
from tests.builders import FLAG, text_response

LIMIT = {"max_tokens": 8}
USER = {"role": "user", "content": "count"}


def generation(parameters: dict[str, Any] | None = None, **texts: str) -> InferRequest:
    """A request of the text contract; `texts` are further inputs."""
    inputs = tuple(text_tensor(name, [text]) for name, text in {"text_input": "p", **texts}.items())
    return InferRequest(model="m", inputs=inputs, parameters=LIMIT | (parameters or {}))


def openai(endpoint: str, **body: Any) -> InferRequest:
    given = {"openai_request": orjson.dumps(body).decode(), "openai_endpoint": endpoint}
    inputs = tuple(text_tensor(name, [text]) for name, text in given.items())
    return InferRequest(model="m", inputs=inputs)


def chat(**body: Any) -> InferRequest:
    return openai("chat/completions", **{"messages": [USER], "stream": True, **body})


def completion(**body: Any) -> InferRequest:
    return openai("completions", **{"prompt": "p", "stream": True, **body})


def chunk(tokens: int, *choices: dict[str, Any], **members: Any) -> InferResponse:
    """A chunk of OpenAI's API."""
    body = {"id": "1", "created": 1, "choices": choices, **members}
    output = text_tensor("openai_response", [orjson.dumps(body).decode()])
    usage = Usage(prompt_tokens=members.pop("prompt", 0), completion_tokens=tokens)
    return InferResponse(outputs=(output,), usage=usage)


def said(content: str, finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    """A choice of a chunk of a conversation, as vLLM makes it."""
    delta["content"] = content
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


ROLE = chunk(0, said("", role="assistant"))


def body(request: InferRequest) -> dict[str, Any]:
    """The body of a request, or its text and parameters."""
    given = {each.name: each.elements()[0].decode() for each in request.inputs}
    found: dict[str, Any] = orjson.loads(given.pop("openai_request", "{}"))
    return found or {**given, **request.parameters}


def parts(request: InferRequest, text: str, tokens: int = 1) -> list[InferResponse]:
    """A response with a text, in the form of a request."""
    if request.input("openai_request") is None:
        return [text_response(text, tokens=tokens)]
    if b"messages" in request.inputs[0].elements()[0]:
        return [ROLE, chunk(tokens, said(text))]
    return [chunk(tokens, {"index": 0, "text": text, "finish_reason": None})]


def sent(request: InferRequest, text: str, tokens: int = 3) -> SentText:
    """A request of whose answer a text was sent."""
    found = SentText(request)
    for each in parts(request, text, tokens):
        assert found.take(each) == each
    return found


def answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


BEGUN = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (generation(), {"text_input": "p one", "max_tokens": 5}),
        (
            generation({"min_tokens": "4"}),
            {"text_input": "p one", "max_tokens": 5, "min_tokens": 1},
        ),
        (generation({"min_tokens": 2}), {"text_input": "p one", "max_tokens": 5, "min_tokens": 0}),
        (
            generation({"seed": None, "n": 1, "echo": False}),
            {"text_input": "p one", "max_tokens": 5},
        ),
        *(
            (generation({name: empty}), {"text_input": "p one"})
            for name in ("bad_words", "stop_words")
            for empty in ([], [""], "", None)
        ),
        (generation({"guided_json": None, "stop": ""}), {"text_input": "p one"}),
        (generation({"stop": '["x"]', "temperature": 0.7}), {"text_input": "p one"}),
        (completion(max_tokens=8), {"prompt": "p one", "max_tokens": 5}),
        (completion(), {"prompt": "p one", "max_tokens": 13}),
        (completion(presence_penalty=0.0, logprobs=None), {"prompt": "p one"}),
        (chat(), {"messages": [USER, answer(" one")], **BEGUN}),
        (chat(chat_template_kwargs={"thinking": False}), {"messages": [USER, answer(" one")]}),
        (chat(max_completion_tokens=8), {"max_completion_tokens": 5}),
        (chat(documents=[], logprobs=False), {"messages": [USER, answer(" one")]}),
        (chat(tools=[], tool_choice="none", logprobs=False), {"messages": [USER, answer(" one")]}),
        (chat(messages=[USER, answer("zero")], **BEGUN), {"messages": [USER, answer("zero one")]}),
    ],
)
def test_the_rest_of_a_text_has_the_text_so_far_behind_its_prompt(
    request_: InferRequest, expected: dict[str, Any]
) -> None:
    rest = body(sent(request_, " one").rest())
    assert rest | expected == rest


def test_sampling_parameters_in_an_input_get_the_lower_limit() -> None:
    request = generation(sampling_parameters='{"max_tokens": 10, "temperature": 0}')
    rest = sent(request, "x").rest()
    assert body(rest)["sampling_parameters"] == '{"max_tokens":7,"temperature":0}'
    assert rest.parameters == LIMIT


REASONING = said("", reasoning="hm")
TOOL = said("", tool_calls=[{"index": 0}])
OTHER_TEXTS = InferResponse(outputs=(text_tensor("text_output", ["a", "b"]),))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        *((generation({name: 1}), name) for name in ("seed", "presence_penalty", "logprobs")),
        *((generation({name: 2}), name) for name in ("n", "frequency_penalty", "best_of")),
        *((generation({name: 0}), name) for name in ("seed", "prompt_logprobs", "logprobs")),
        (generation({"guided_json": {"type": "object"}}), "guided_json"),
        (generation({"structured_outputs": {"regex": "a"}}), "structured_outputs"),
        (generation({"bad_words": ["x"]}), "bad_words"),
        *((generation({"guided_json": empty}), "guided_json") for empty in ({}, [], "", False)),
        (completion(suffix=""), "'suffix'"),
        (generation({"max_tokens": None}), "no 'max_tokens'"),
        (generation({"max_tokens": "many"}), "'max_tokens' of the request is no number"),
        (generation({"max_tokens": 3}), "'max_tokens' are used up"),
        (generation({"stop": 7}), "'stop' of the request is no list"),
        (generation({"stop": "[7"}), "'stop' of the request is no list"),
        *((generation(**{name: "x"}), name) for name in ("messages", "image", "return_logprobs")),
        (generation(sampling_parameters="7"), "'sampling_parameters' is no JSON object"),
        (replace(generation(), sequence=SequenceTag(7)), "belongs to a sequence"),
        *((completion(**{name: 1}), name) for name in ("seed", "logprobs", "prompt_logprobs")),
        (completion(echo=True), "'echo'"),
        (completion(logprobs=0), "'logprobs'"),
        (completion(prompt=["a", "b"]), "no single text"),
        (completion(prompt=[1, 2]), "no single text"),
        (completion(suffix="x"), "'suffix'"),
        (chat(n=2), "'n'"),
        (chat(tools=[{"type": "function"}]), "'tools'"),
        (chat(response_format={"type": "json_object"}), "'response_format'"),
        (chat(logprobs=True), "'logprobs'"),
        (chat(add_generation_prompt=False), "'add_generation_prompt'"),
        (chat(chat_template_kwargs={"enable_thinking": True}), "may begin a reasoning"),
        (chat(chat_template_kwargs=["thinking"]), "may begin a reasoning"),
        (chat(messages=[]), "no conversation"),
        (chat(messages="x"), "no conversation"),
        (chat(messages=[{"role": "user", "content": []}], **BEGUN), "last message is no text"),
        (openai("responses", input="x", stream=True), "endpoint is 'responses'"),
    ],
)
def test_a_request_whose_rest_would_be_wrong_is_not_continued(
    request_: InferRequest, reason: str
) -> None:
    with pytest.raises(NotContinued, match=reason):
        sent(request_, "one").rest()


@pytest.mark.parametrize(
    ("request_", "text", "reason"),
    [
        (generation({"stop": ["END", "###"]}), "one #", "beginning of a stop string"),
        (completion(stop="END"), "one EN", "beginning of a stop string"),
        (chat(), "one\n", "white space"),
        (chat(), "<think>one", "has reasoning"),
        (chat(), "one</think>two", "has reasoning"),
    ],
)
def test_a_text_that_ends_where_its_rest_would_be_wrong_is_not_continued(
    request_: InferRequest, text: str, reason: str
) -> None:
    with pytest.raises(NotContinued, match=reason):
        sent(request_, text).rest()


@pytest.mark.parametrize(
    ("request_", "response", "reason"),
    [
        (chat(), chunk(1, REASONING), "a chunk has more than a text"),
        (chat(), chunk(1, TOOL), "a chunk has more than a text"),
        (chat(), chunk(1, said("x") | {"logprobs": {}}), "a chunk has more than a text"),
        (generation(), OTHER_TEXTS, "'text_output' has 2 texts"),
        (generation(), text_response("x"), "no numbers of tokens"),
    ],
    ids=["reasoning", "tools", "logprobs", "texts", "usage"],
)
def test_a_response_with_more_than_a_text_ends_the_hope_of_a_continuation(
    request_: InferRequest, response: InferResponse, reason: str
) -> None:
    found = SentText(request_)
    assert found.take(response) is response
    with pytest.raises(NotContinued, match=reason):
        found.rest()


def test_a_text_of_many_parts_takes_little_more_than_its_bytes() -> None:
    found, part = SentText(generation({"max_tokens": 10**6})), text_response("ö", tokens=1)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            found.take(part)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 40_000
    assert body(found.rest())["text_input"] == "p" + "ö" * 10_000


def test_an_account_counts_tokens_or_else_characters() -> None:
    assert sent(generation(), "one", tokens=2).account == "2 tokens were sent"
    assert sent(chat(tools=[1]), "one", tokens=2).account == "2 tokens were sent"
    assert sent(generation(), "one", tokens=0).account == "3 characters were sent"


def test_the_parts_of_a_text_have_one_usage() -> None:
    optional = text_tensor("num_input_tokens", ["first"])
    first = InferResponse(
        outputs=(text_tensor("text_output", ["a"]), optional),
        usage=Usage(prompt_tokens=4, completion_tokens=2),
    )
    found = SentText(generation())
    assert found.take(first) is first
    found.rest()
    outputs = (text_tensor("text_output", ["b"]), text_tensor("num_input_tokens", ["second"]))
    rest = replace(first, outputs=outputs, usage=Usage(6, 1, "stop"), final=True)
    joined = found.take(rest)
    assert joined == replace(
        rest,
        outputs=(outputs[0], optional),
        usage=Usage(0, 1, "stop"),
        parameters={"continued": 1},
    )
    assert (found.tokens, found.is_complete) == (3, True)


def test_the_parts_of_a_conversation_are_one_stream_of_chunks() -> None:
    found = SentText(chat(stream_options={"include_usage": True}))
    for each in (ROLE, chunk(2, said("one"), prompt=9)):
        assert found.take(each) is each
    found.rest()
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
    head = {"id": "2", "created": 2}
    assert found.take(chunk(1, said("", role="assistant"), **head)) is None
    joined = []
    for each in (
        chunk(1, said(" two"), **head),
        chunk(1, said("", "stop"), **head),
        chunk(0, usage=usage | {"prompt_tokens_details": {"cached_tokens": 11}}, **head),
        FLAG,
    ):
        taken = found.take(each)
        assert taken is not None
        joined.append(taken)
    assert [each.usage and each.usage.completion_tokens for each in joined] == [2, 1, 0, None]
    assert joined[-1] == replace(FLAG, parameters={"continued": 1})
    bodies = [orjson.loads(each.outputs[0].elements()[0]) for each in joined[:-1]]
    assert {(each["id"], each["created"]) for each in bodies} == {("1", 1)}
    assert bodies[0]["choices"] == [said(" two")]
    assert [each.get("continued") for each in bodies] == [None, 1, None]
    assert bodies[2]["usage"] == {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
    assert found.is_complete


def test_a_text_that_has_its_end_is_complete_without_the_last_flag() -> None:
    end = chunk(1, said("", "stop"))
    found = sent(chat(), "one")
    found.take(end)
    assert found.is_complete
    awaited = sent(chat(stream_options={"include_usage": True}), "one")
    awaited.take(end)
    assert not awaited.is_complete
    with pytest.raises(NotContinued, match="only its usage is missing"):
        awaited.rest()


def test_a_rest_that_is_no_text_ends_with_an_error() -> None:
    found = sent(chat(), "one")
    found.rest()
    with pytest.raises(InferenceError, match="4 tokens were sent; its continuation is no text"):
        found.take(chunk(1, REASONING))


def test_a_text_is_continued_again_from_all_that_was_sent() -> None:
    found = sent(chat(max_tokens=9), "one")
    found.rest()
    for each in parts(chat(), " two"):
        found.take(each)
    rest = body(found.rest())
    assert (rest["messages"], rest["max_tokens"]) == ([USER, answer("one two")], 5)
