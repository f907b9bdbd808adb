"""Costs of requests before they are executed."""

import math
from dataclasses import replace
from typing import Any

import orjson
import pytest

from gateway.admission.costs import (
    ANSWERS,
    FIRST_ANSWER,
    READ_BYTES,
    Asked,
    ModelCosts,
    read_asked,
    used_tokens,
)
from gateway.config import ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.messages import InferRequest, Usage
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from gateway.openai_contract import ENDPOINT, REQUEST, Endpoint, RequestBody
from gateway.tensor import Datatype, Tensor, text_tensor
from tests.builders import TEXT, text_request

TENSORS = replace(
    TEXT,
    input=(ModelInput(name="x", data_type=DataType.TYPE_STRING, dims=(1,)),),
    output=(ModelOutput(name="y", data_type=DataType.TYPE_STRING, dims=(1,)),),
)


def openai(members: Any, endpoint: Endpoint = Endpoint.CHAT, *, parsed: bool = True) -> Asked:
    body = orjson.dumps(members)
    data: Any = RequestBody(body, members) if parsed else (body,)
    request = Tensor(REQUEST, Datatype.BYTES, (1,), data)
    inputs = (request, text_tensor(ENDPOINT, [endpoint.value]))
    found = read_asked(InferRequest(model="m", inputs=inputs))
    assert found.prompt_bytes == len(body)
    return replace(found, prompt_bytes=0)


@pytest.mark.parametrize("parsed", [True, False])
@pytest.mark.parametrize(
    ("members", "endpoint", "asked"),
    [
        ({"messages": []}, Endpoint.CHAT, Asked()),
        ({"max_tokens": 7}, Endpoint.CHAT, Asked(max_tokens=7)),
        ({"max_completion_tokens": 7, "max_tokens": 9}, Endpoint.CHAT, Asked(max_tokens=9)),
        ({"max_tokens": "4000", "n": "2"}, Endpoint.COMPLETIONS, Asked(1, 0, 2, 4000)),
        ({"max_tokens": 100.0}, Endpoint.CHAT, Asked(max_tokens=100)),
        ({"max_output_tokens": 7, "input": ["a", "b"]}, Endpoint.RESPONSES, Asked(max_tokens=7)),
        ({"max_tokens": 5, "n": 3}, Endpoint.CHAT, Asked(answers=3, max_tokens=5)),
        ({"n": 2, "best_of": 4}, Endpoint.COMPLETIONS, Asked(answers=4)),
        (
            {"prompt": ["a", "b"], "n": 3, "max_tokens": 5},
            Endpoint.COMPLETIONS,
            Asked(prompts=2, answers=6, max_tokens=5),
        ),
        ({"prompt": [1, 2, 3]}, Endpoint.COMPLETIONS, Asked()),
        ({"prompt": [[1], [2]]}, Endpoint.COMPLETIONS, Asked(prompts=2, answers=2)),
        (
            {"input": ["a", "b", "c"], "max_tokens": 5},
            Endpoint.EMBEDDINGS,
            Asked(prompts=3, answers=3, max_tokens=0),
        ),
        (
            {"query": "q", "documents": ["a", "b"]},
            Endpoint.RERANK,
            Asked(prompts=2, answers=2, max_tokens=0),
        ),
        *(
            ({"text_1": "q", name: ["a", "b"]}, Endpoint.SCORE, Asked(2, 0, 2, 0))
            for name in ("text_2", "data_2", "items")
        ),
        ({"max_tokens": 2**63, "n": 2**63}, Endpoint.CHAT, Asked(answers=2**63, max_tokens=2**63)),
        *(
            ({"max_tokens": junk, "n": junk}, Endpoint.CHAT, Asked())
            for junk in (-1, True, math.inf, "x", "9" * 1000, "1e999", None, [], {})
        ),
    ],
)
def test_the_size_of_a_request_to_openais_endpoints(
    members: dict[str, Any], endpoint: Endpoint, asked: Asked, *, parsed: bool
) -> None:
    assert openai(members, endpoint, parsed=parsed) == asked


def test_the_members_of_a_request_are_left_to_the_model() -> None:
    body = RequestBody(b"{}", {"max_tokens": 7})
    tensor = Tensor(REQUEST, Datatype.BYTES, (1,), body)
    assert read_asked(InferRequest(model="m", inputs=(tensor,))).max_tokens == 7
    assert body.take() == {"max_tokens": 7}


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"max_tokens": 7, "x": "%b"}' % (b"x" * READ_BYTES)]
)
def test_a_body_that_is_not_read_counts_by_its_bytes(body: bytes) -> None:
    tensor = Tensor(REQUEST, Datatype.BYTES, (1,), (body,))
    found = read_asked(InferRequest(model="m", inputs=(tensor,)))
    assert found == Asked(prompt_bytes=len(body))


def test_the_size_of_a_request_to_v2() -> None:
    asked = read_asked(text_request("hello", parameters={"max_tokens": 7, "n": 2}))
    assert asked == Asked(1, 5, 2, 7)
    batch = InferRequest(model="m", inputs=(text_tensor("text_input", ["ab", "cde"]),))
    assert read_asked(batch) == Asked(2, 5, 2, None)
    sampling = text_tensor("sampling_parameters", ['{"max_tokens": 3}'])
    both = InferRequest(
        model="m", inputs=(*text_request("x").inputs, sampling), parameters={"max_tokens": 9}
    )
    assert read_asked(both).max_tokens == 3
    number = Tensor("max_tokens", Datatype.INT32, (1,), (11).to_bytes(4, "little"))
    with_tensor = InferRequest(model="m", inputs=(*text_request("x").inputs, number))
    assert read_asked(with_tensor).max_tokens == 11


def test_no_tensor_is_split_to_find_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of a byte each has five times as many bytes on the wire, and costs a second."""
    text = Tensor("text_input", Datatype.BYTES, (4096,), b"\1\0\0\0x" * 4096)
    many = Tensor("sampling_parameters", Datatype.BYTES, (512,), b"\1\0\0\0x" * 512)
    long = text_tensor("sampling_parameters", ['{"max_tokens": 3, "x": "%s"}' % ("x" * READ_BYTES)])
    monkeypatch.setattr(Tensor, "elements", lambda tensor: pytest.fail("it was split"))
    for sampling in (many, replace(long, data=long.raw())):
        found = read_asked(InferRequest(model="m", inputs=(text, sampling)))
        assert found == Asked(4096, 5 * 4096, 4096, None)


def model(**fields: Any) -> Model:
    return Model(replace(TEXT, **fields), 1, ModelStatistics(), [])


def test_an_answer_without_a_limit_is_expected_to_be_long_as_nine_of_ten_were() -> None:
    costs, asked = ModelCosts(model()), Asked(prompt_bytes=0)
    assert costs.tokens(asked, "a", None) == FIRST_ANSWER
    for tokens in range(1, ANSWERS + 1):
        costs.learn(asked, "a", 0, tokens)
    assert costs.tokens(asked, "a", None) == 29
    assert costs.tokens(asked, "b", None) == FIRST_ANSWER


def test_the_tokens_of_prompts_follow_those_that_were_counted() -> None:
    costs = ModelCosts(model())
    asked = Asked(prompt_bytes=4000, max_tokens=0)
    assert costs.tokens(asked, "a", None) == 1000
    for _ in range(2000):
        costs.learn(asked, "a", 2000, 0)
    assert costs.tokens(asked, "a", None) == pytest.approx(2000, rel=0.01)


def test_a_request_is_booked_with_no_more_than_the_model_takes() -> None:
    costs = ModelCosts(model())
    huge = Asked(prompt_bytes=400, answers=2, max_tokens=2**63)
    assert costs.tokens(huge, "a", 1000) == 100 + 2 * 900
    assert costs.tokens(Asked(prompt_bytes=400_000), "a", 1000) == 1000
    assert costs.tokens(huge, "a", None) == 100 + 2 * 2**63


def test_a_model_without_tokens_has_none_booked_until_it_reports_some() -> None:
    costs = ModelCosts(model(input=TENSORS.input, output=TENSORS.output))
    assert costs.tokens(costs.asked(text_request("hello")), "a", None) == 0
    costs.learn(Asked(), "a", 3, 4)
    assert costs.tokens(costs.asked(text_request("hello")), "a", None) > 0


def test_a_cached_token_of_a_prompt_costs_a_tenth() -> None:
    assert used_tokens(Usage(100, 20)) == 120
    assert used_tokens(Usage(100, 20, cached_tokens=90)) == pytest.approx(10 + 9 + 20)
