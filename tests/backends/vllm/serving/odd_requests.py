"""Requests of OpenAI's that are wrong, and those that are only odd."""

import json
from typing import Any

import pytest

from gateway.messages import InferRequest
from gateway.openai_contract import OpenAiRefusal
from tests.backends.vllm.conftest import CONTEXT, Llama

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def said(content: Any) -> dict[str, Any]:
    """A conversation of one message."""
    return {"messages": [{"role": "user", "content": content}]}


def image(url: str) -> dict[str, Any]:
    """A conversation about an image."""
    return said([{"type": "image_url", "image_url": {"url": url}}])


def schema(of: Any) -> dict[str, Any]:
    """An answer that must fit a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": of}}}


def tools(parameters: Any) -> dict[str, Any]:
    """A tool with these parameters that must be called."""
    function = {"name": "f", "strict": True, "parameters": parameters}
    tool = {"type": "function", "function": function}
    return {"tools": [tool], "tool_choice": "required"}


def nested(depth: int) -> dict[str, Any]:
    """A schema of objects in objects."""
    of: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        of = {"type": "object", "properties": {"a": of}}
    return of


LENGTHS = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string", "maxLength": 1900 + n} for n in range(100)},
}
MANY = {f"p{number}": {"type": "string"} for number in range(5000)}
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no messages": ({"messages": None}, 400, "malformed"),
    "empty messages": ({"messages": []}, 400, "empty conversation"),
    "messages that are a text": ({"messages": "hi"}, 400, "messages"),
    "a message that is a number": ({"messages": [1]}, 400, "messages.0"),
    "a role that is a number": ({"messages": [{"role": 1, "content": "hi"}]}, 400, "messages.0"),
    "a message without a role": ({"messages": [{"content": "hi"}]}, 400, "messages.0"),
    "a part of no known type": (said([{"type": "nonsense", "x": 1}]), 400, "should be 'text'"),
    "a prompt beyond the context": (said("word " * 2 * CONTEXT), 400, "maximum context length"),
    "a template of the client's": ({"chat_template": "{{ 1 }}"}, 400, "untrusted chat template"),
    "a template among its arguments": (
        {"chat_template_kwargs": {"chat_template": "x"}},
        400,
        "untrusted chat template",
    ),
    "arguments that break the template": (
        {"chat_template_kwargs": {"messages": 5}},
        400,
        "multiple values",
    ),
    "an image elsewhere": (image("http://127.0.0.1:9/x.png"), 400, "not a multimodal model"),
    "an image in a file": (image("file:///etc/passwd"), 400, "not a multimodal model"),
    "an image in the request": (image("data:image/png;base64,AA=="), 400, "not a multimodal model"),
    "another model": ({"model": "nobody"}, 404, "The model `nobody` does not exist."),
    "a million sequences": ({"n": 10**6}, 400, "n must be at most"),
    "sixty-five sequences": ({"n": 65, "temperature": 1}, 400, "n is 65, expected at most 64"),
    "no sequence": ({"n": 0}, 400, "n must be at least 1"),
    "a million logprobs": ({"logprobs": True, "top_logprobs": 10**6}, 400, "max allowed: 20"),
    "all logprobs": ({"logprobs": True, "top_logprobs": -1}, 400, "max allowed: 20"),
    "a million beams": ({"use_beam_search": True, "n": 10**6}, 400, "beam_width must be at most"),
    "eleven beams": ({"use_beam_search": True, "n": 11}, 400, "max allowed: 20"),
    "ten thousand stop strings": ({"stop": [str(n) for n in range(10_000)]}, 400, "stop"),
    "sixty-five stop strings": ({"stop": [str(n) for n in range(65)]}, 400, "stop"),
    "a long stop string": ({"stop": "x" * 2000}, 400, "the length of a string in stop is 2000"),
    "an empty stop string": ({"stop": [""]}, 400, "empty string"),
    "absurdly many tokens": ({"max_tokens": 10**9}, 400, "max_tokens"),
    "fewer than no tokens": ({"max_tokens": -1}, 400, "max_tokens"),
    "a temperature in words": ({"temperature": "hot"}, 400, "temperature"),
    "a seed of a hundred bits": ({"seed": 2**100}, 400, "seed"),
    "a biased token outside": ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    "a stream that may be": ({"stream": "maybe"}, 400, "stream"),
    "a transfer without tokens": (
        {"kv_transfer_params": {"prompt_token_ids": [-5]}},
        400,
        "kv_transfer_params",
    ),
    "arguments of a processor": ({"mm_processor_kwargs": {"a": 1}}, 400, "mm_processor_kwargs"),
    "no tool": ({"tools": []}, 400, "`tools` must not be an empty array"),
    "tools that are a text": ({"tools": "x"}, 400, "tools"),
    "a tool that is a number": ({"tools": [5], "tool_choice": NAMED}, 400, "malformed"),
    "a tool without a function": ({"tools": [{}], "tool_choice": NAMED}, 400, "malformed"),
    "a choice without tools": ({"tool_choice": "required"}, 400, "`tools` must be set"),
    "an unknown choice": ({"tools": [WEATHER], "tool_choice": "maybe"}, 400, "tool_choice"),
    "a format of no known type": ({"response_format": {"type": "x"}}, 400, "response_format"),
    "a format without a schema": (
        {"response_format": {"type": "json_schema"}},
        400,
        "'json_schema' field must be provided",
    ),
    "a schema of no known type": (schema({"type": "nonsense"}), 400, "nonsense"),
    "a schema that is a number": (schema(5), 400, "response_format"),
    "a reference to nowhere": (schema({"$ref": "#/x"}), 400, "/x"),
    "a reference to itself": (schema({"$ref": "#"}), 400, "cannot follow"),
    "a circle of references": (
        schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        400,
        "cannot follow",
    ),
    "a schema nested too deep": (schema(nested(70)), 400, "nested too deep"),
    "five thousand properties": (
        schema({"type": "object", "properties": MANY}),
        400,
        "the size of the grammar",
    ),
    "a schema of two megabytes": (
        schema({"description": "x" * 2_000_000}),
        400,
        "response_format is larger than",
    ),
    "tools of two megabytes": (tools({"description": "x" * 2_000_000}), 400, "tools is larger"),
    "a tool with five thousand parameters": (
        tools({"type": "object", "properties": MANY}),
        400,
        "the size of the grammar",
    ),
    "a pattern that repeats ten thousand times": (
        schema({"type": "string", "pattern": "^[a-z]{1,10000}$"}),
        400,
        "takes too long to prepare",
    ),
    "the same beside a tool": (
        schema({"type": "string", "pattern": "^[a-z]{1,10000}$"}) | {"tools": [WEATHER]},
        400,
        "takes too long to prepare",
    ),
    "the same in a tool": (
        tools({"type": "object", "properties": {"a": {"pattern": "^[a-z]{1,10000}$"}}}),
        400,
        "takes too long to prepare",
    ),
    "texts of a hundred lengths": (schema(LENGTHS), 400, "100 different lengths"),
    "an open expression": ({"structured_outputs": {"regex": "([a-z"}}, 400, "unclosed"),
    "three thousand brackets": (
        {"structured_outputs": {"regex": "(" * 3000 + "a" + ")" * 3000}},
        400,
        "regex",
    ),
    "an open grammar": ({"structured_outputs": {"grammar": "root ::= ("}}, 400, "grammar"),
    "a grammar without end": (
        {"structured_outputs": {"grammar": "root ::= root"}},
        400,
        "cannot follow",
    ),
    "no constraint": ({"structured_outputs": {}}, 400, "none are specified"),
    "no choice": ({"structured_outputs": {"choice": []}}, 400, "empty list"),
    "two constraints": (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        400,
        "only use one kind",
    ),
    "a constraint that is a text": ({"structured_outputs": "x"}, 400, "malformed"),
}
SERVED = {
    "a role nobody has heard of": {"messages": [{"role": "king", "content": "hi"}]},
    "a tool of trees": tools({"type": "object", "properties": {"c": {"$ref": "#"}}}),
    "a schema of trees": schema({"type": "object", "properties": {"c": {"$ref": "#"}}}),
    "a schema that doubles thirty times": schema(
        {
            "$ref": "#/$defs/a0",
            "$defs": {
                "a30": {"type": "string"},
                **{
                    f"a{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{n + 1}"}] * 2}
                    for n in range(30)
                },
            },
        }
    ),
    "an expression of huge repetition": {
        "structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}
    },
    "an id of the client's": {"request_id": "x", "session_id": "y"},
    "a field nobody has heard of": {"nonsense": [1, {"a": None}]},
}
LEAKS = ("Traceback", "site-packages", ".cache", "/tmp", "pydantic.dev", " at 0x")


async def refused(llama: Llama, request: InferRequest) -> OpenAiRefusal:
    """The refusal, whose body says the same."""
    with pytest.raises(OpenAiRefusal) as caught:
        await llama.answers(request)
    error = json.loads(caught.value.body)["error"]
    assert error["message"] == caught.value.message
    assert error["code"] == caught.value.status
    assert error.keys() == {"message", "type", "param", "code"}
    assert not [leak for leak in LEAKS if leak in caught.value.message]
    return caught.value
