"""Thoughts and calls of tools, as the library's parsers read them from a chat's text."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from sluice_llm.chat import ChatPiece, ForcedToolReader, ToolCall, Tools

from backends.tensorrtllm.worker.sluice_tensorrtllm.parsers import ParsedReader, Parsers
from tests.backends.tensorrtllm.conftest import Engine, load_error
from tests.serving import Serving

pytestmark = pytest.mark.timeout(120)
PATH = "/v1/chat/completions"
THOUGHT = "it is far </think>"
PARIS = '<tool_call> {"name": "weather", "arguments": {"city": "Paris"}} </tool_call>'
ROME = PARIS.replace("Paris", "Rome")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def chat(content: str, **more: Any) -> dict[str, Any]:
    """A chat with a model that repeats its prompt."""
    return {"model": "reader", "messages": [{"role": "user", "content": content}], **more}


def answered(server: Serving, body: dict[str, Any], *, stream: bool) -> tuple[Any, str | None]:
    """The message and the finish reason, put together by the client."""
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="-", max_retries=0) as client:
        if not stream:
            whole: Any = client.chat.completions.create(**body)
            return whole.choices[0].message, whole.choices[0].finish_reason
        chunks: Any = client.chat.completions.create(**body, stream=True)
        choices = [chunk.choices[0] for chunk in chunks]
    return together([each.delta for each in choices]), choices[-1].finish_reason


def together(deltas: Sequence[Any]) -> Any:
    calls: dict[int, Any] = {}
    for piece in (each for delta in deltas for each in delta.tool_calls or ()):
        if piece.id:
            assert piece.type == "function"
            function = SimpleNamespace(name=piece.function.name, arguments="")
            calls[piece.index] = SimpleNamespace(id=piece.id, function=function)
        calls[piece.index].function.arguments += piece.function.arguments
    return SimpleNamespace(
        content="".join(each.content or "" for each in deltas),
        reasoning="".join(getattr(each, "reasoning", None) or "" for each in deltas),
        tool_calls=[calls[index] for index in sorted(calls)] or None,
    )


def called(message: Any) -> list[tuple[str, Any]]:
    found = [each.function for each in message.tool_calls or ()]
    assert len({each.id for each in message.tool_calls or ()}) == len(found)
    return [(each.name, json.loads(each.arguments)) for each in found]


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_apart_from_the_answer(server: Serving, stream: bool) -> None:
    message, reason = answered(server, chat(f"{THOUGHT} yes"), stream=stream)
    assert (message.content, message.reasoning) == (" yes", "<user> it is far ")
    assert (message.tool_calls, reason) == (None, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_apart_from_the_answer(server: Serving, stream: bool) -> None:
    body = chat(f"{THOUGHT} well {PARIS} {ROME}", tools=[WEATHER])
    message, reason = answered(server, body, stream=stream)
    assert called(message) == [("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})]
    assert (message.content.strip(), reason) == ("well", "tool_calls")
    assert message.reasoning == "<weather> <user> it is far "


@pytest.mark.parametrize("stream", [False, True])
def test_calls_may_be_limited_to_one(server: Serving, stream: bool) -> None:
    body = chat(f"{THOUGHT} {PARIS} {ROME}", tools=[WEATHER], parallel_tool_calls=False)
    message, _ = answered(server, body, stream=stream)
    assert called(message) == [("weather", {"city": "Paris"})]


def test_members_that_parsers_do_not_read_are_left_to_the_template(server: Serving) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    message, _ = answered(server, chat(f"{THOUGHT} {PARIS}", tools=[strict]), stream=False)
    assert called(message) == [("weather", {"city": "Paris"})]


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_calls_of_a_chat_without_tools_are_text(server: Serving, more: dict[str, Any]) -> None:
    message, reason = answered(server, chat(f"{THOUGHT} {PARIS}", **more), stream=False)
    assert (message.content, message.tool_calls, reason) == (f" {PARIS}", None, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_is_named_is_called(server: Serving, engine: Engine, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    body = chat("Oslo", tools=[WEATHER], tool_choice=choice, model="llm")
    with_text = "<weather> <user> Oslo"
    if stream:
        body["stream"] = True
    with httpx.Client(base_url=server.http) as http:
        answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    sampling = engine.asked(with_text)["sampling"]
    assert json.loads(sampling["guided_decoding"]["json"]) == WEATHER["function"]["parameters"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    said = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
    pieces = [
        piece
        for each in said
        for piece in each.get("delta", each.get("message")).get("tool_calls", ())
    ]
    assert "".join(each["function"]["arguments"] for each in pieces) == with_text
    assert [each["function"]["name"] for each in pieces if "id" in each] == ["weather"]
    assert said[-1]["finish_reason"] == "stop"


def test_a_text_that_no_parser_reads_is_an_error(http: httpx.Client) -> None:
    body = chat(f"{THOUGHT} <tool_call> none </tool_call>", tools=[WEATHER])
    response = http.post(PATH, json=body)
    assert response.status_code == 500
    assert "the text cannot be read: " in response.json()["error"]["message"]
    assert http.post(PATH, json=chat(f"{THOUGHT} yes")).status_code == 200


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        ({"tools": {}}, 400, "'tools' is {}, expected a list"),
        ({"tools": [{}]}, 400, "expected the type function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, 400, "that has a name"),
        (
            {"tools": [{"type": "function", "function": {"name": "weather", "parameters": 1}}]},
            400,
            "'tools' are refused: 'function.parameters': Input should be a valid dictionary",
        ),
        ({"tools": [WEATHER], "tool_choice": "required"}, 501, '"required"'),
        ({"tools": [WEATHER], "tool_choice": "weather"}, 400, "expected a function of 'tools'"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            400,
            "expected a function of 'tools'",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "response_format": {"type": "json_object"},
            },
            400,
            "exclude each other",
        ),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, 400, "expected true or false"),
        ({"tools": [WEATHER], "model": "llm"}, 501, "'tool_call_parser' names no parser"),
    ],
)
def test_wrong_tools_are_refused(
    http: httpx.Client, more: dict[str, Any], status: int, text: str
) -> None:
    response = http.post(PATH, json={**chat("x"), **more})
    assert response.status_code == status, response.text
    assert text in response.json()["error"]["message"]


def test_a_parser_that_is_none_fails_the_load(http: httpx.Client) -> None:
    error = load_error(http, "bad_parser")
    assert "tensorrt_llm has no parser 'deepseek-r1' and 'qwen33'" in error
    assert "Supported parsers: ['qwen3']" in error


@pytest.mark.parametrize(
    ("parsers", "tools", "raw"),
    [
        (Parsers(raw_tools=True), None, False),
        (Parsers(raw_tools=True), Tools([WEATHER]), True),
        (Parsers(raw_tools=True), Tools([WEATHER], named="weather"), False),
        (Parsers(raw_thoughts=True), None, True),
        (Parsers(), Tools([WEATHER]), False),
    ],
)
def test_a_parser_that_looks_for_special_tokens_has_them(
    parsers: Parsers, tools: Tools | None, raw: bool
) -> None:
    assert parsers.sampling(tools) == ({"skip_special_tokens": False} if raw else {})


def test_thoughts_marked_by_special_tokens_are_read(server: Serving, engine: Engine) -> None:
    message, _ = answered(server, chat(f"{THOUGHT} raw"), stream=False)
    assert message.content == " raw"
    sampling = engine.asked(f"<user> {THOUGHT} raw")["sampling"]
    assert sampling["skip_special_tokens"] is False


class Finds:
    """A parser that holds back what may be the beginning of a call."""

    def __init__(self, *found: Any) -> None:
        self._found = list(found)

    def parse_streaming_increment(self, text: str, tools: Sequence[Any]) -> Any:
        return self._found.pop(0)


def found(text: str, *calls: Any) -> Any:
    return SimpleNamespace(normal_text=text, calls=calls)


def test_held_back_text_that_is_no_call_is_content() -> None:
    parser = Finds(found("a "), found(""))
    reader = ParsedReader(None, parser, [], stream=True, parallel=True)
    assert reader.read("a <", final=False) == ChatPiece("a ")
    assert reader.read("to", final=True) == ChatPiece("<to")


def test_held_back_text_of_a_call_is_no_content() -> None:
    call = SimpleNamespace(tool_index=0, name="f", parameters="")
    reader = ParsedReader(None, Finds(found("", call), found("")), [], stream=True, parallel=True)
    assert reader.read("<tool>", final=False) == ChatPiece(calls=(ToolCall(0, "f", ""),))
    assert reader.read("{", final=True) == ChatPiece()


def test_the_rest_of_thoughts_is_sent_at_the_end() -> None:
    thoughts = SimpleNamespace(
        parse_delta=lambda text: SimpleNamespace(content="", reasoning_content=text),
        finish=lambda: SimpleNamespace(content="c", reasoning_content="r"),
    )
    reader = ParsedReader(thoughts, None, [], stream=True, parallel=True)
    assert reader.read("a", final=False) == ChatPiece(thoughts="a")
    assert reader.read("b", final=True) == ChatPiece("c", "br")


def test_a_forced_call_has_its_name_once() -> None:
    reader = ForcedToolReader("f")
    assert reader.read("", final=False) == ChatPiece(calls=(ToolCall(0, "f", ""),))
    assert reader.read("{", final=False) == ChatPiece(calls=(ToolCall(0, "", "{"),))
    assert reader.read("", final=True) == ChatPiece()
