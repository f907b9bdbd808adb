"""OpenAI's requests to the real engine by the doors of v2: what /v1 can, they can."""

import json
from typing import Any

import pytest

from tests.conformance.clients import text
from tests.e2e.figures import RUNNING, changes, figures, wait_at_rest, wait_in_engine
from tests.e2e.llama import ANSWER, GREEDY, QUESTION, Llama, error_of
from tests.e2e.streams import hear
from tests.raw import Connection
from tests.serving import Serving, http_get, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

CHAT = {"messages": QUESTION, **GREEDY}
STREAMED = {**CHAT, "stream": True}
ENDLESS = {"messages": QUESTION, "max_tokens": 4000, "ignore_eos": True, "stream": True}
PROMPT_TOKENS, TOKENS = 37, 8
GENERATE_STREAM = "/v2/models/llama/generate_stream"


def chunks(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The JSON of the responses."""
    return [json.loads(each["openai_response"]) for each in found]


def said(found: list[dict[str, Any]]) -> str:
    """The text of chunks of a chat."""
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in found)


def test_metadata_has_the_contract(server: Serving) -> None:
    metadata = json.loads(http_get(server.ports["http"], "/v2/models/llama")[1])
    inputs = {each["name"]: each for each in metadata["inputs"]}
    assert inputs["openai_request"]["datatype"] == inputs["openai_endpoint"]["datatype"] == "BYTES"
    assert metadata["outputs"][-1]["name"] == "openai_response"


@pytest.mark.parametrize("body", [CHAT, json.dumps(CHAT)], ids=["object", "text"])
def test_generate_has_the_whole_answer(llama: Llama, body: Any) -> None:
    answer = llama.generate(openai_request=body)
    assert answer.keys() == {"model_name", "model_version", "openai_response"}
    (whole,) = chunks([answer])
    assert whole["choices"][0]["message"]["content"] == ANSWER
    assert whole["usage"]["total_tokens"] == PROMPT_TOKENS + TOKENS


def test_generate_stream_has_one_event_for_each_chunk(llama: Llama) -> None:
    found = chunks(llama.stream(openai_request=STREAMED))
    assert said(found) == ANSWER == llama.generate(**CHAT)["text_output"]
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


def test_names_of_events_are_a_parameter(llama: Llama) -> None:
    asked = {"input": "Hi", "stream": True, "max_output_tokens": 4, "temperature": 0}
    found = llama.stream(openai_request=asked, openai_endpoint="responses")
    assert [event["openai_event"] for event in found] == [each["type"] for each in chunks(found)]
    assert found[-1]["openai_event"] == "response.completed"


def test_model_stream_infer_has_one_response_for_each_chunk(server: Serving) -> None:
    heard = hear(server, text("openai_request", json.dumps(STREAMED)), request_id="chat")
    found = [json.loads(each.as_numpy("openai_response")[0]) for each in heard.results]
    assert heard.errors == []
    assert said(found) == ANSWER
    assert heard.finals == [False] * (len(found) - 1) + [True]
    assert heard.ids == {"chat"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tokens_are_counted_though_the_client_does_not_ask_for_them(
    server: Serving, llama: Llama, stream: bool
) -> None:
    with changes(server) as change:
        if stream:
            llama.stream(openai_request=STREAMED)
        else:
            llama.generate(openai_request=CHAT)
    assert change["gateway_prompt_tokens_total"] == PROMPT_TOKENS
    assert change["gateway_completion_tokens_total"] == TOKENS
    assert change["vllm:generation_tokens_total"] == TOKENS
    assert change["gateway_wasted_tokens_total"] == 0
    assert change["nv_inference_request_success"] == change["nv_inference_exec_count"] == 1


def test_a_stream_has_a_time_to_its_first_token(server: Serving, llama: Llama) -> None:
    with changes(server) as change:
        llama.stream(openai_request=STREAMED)
    assert change["gateway_time_to_first_token_seconds_count"] == 1
    assert 1 <= change["gateway_inter_token_seconds_count"] < TOKENS


@pytest.mark.parametrize(
    ("members", "status", "words"),
    [
        ({"openai_request": {"messages": []}}, 400, "empty conversation"),
        ({"openai_request": {**CHAT, "temperature": "hot"}}, 400, "temperature"),
        ({"openai_request": {**CHAT, "model": "nobody"}}, 404, "`nobody` does not exist"),
        ({"openai_request": {**STREAMED, "n": 10**6}}, 400, "n must be at most"),
        ({"openai_request": "{oops"}, 400, "not valid JSON"),
        ({"openai_request": CHAT, "openai_endpoint": "x"}, 400, "'openai_endpoint' is 'x'"),
        ({"openai_request": {"input": "x"}, "openai_endpoint": "embeddings"}, 501, "Embeddings"),
        ({"openai_request": CHAT, "text_input": "x"}, 400, "got both"),
    ],
)
def test_refusals_are_v2s_own_errors_with_vllms_words(
    server: Serving, llama: Llama, members: dict[str, Any], status: int, words: str
) -> None:
    with changes(server) as change:
        for path in ("/generate", "/generate_stream"):
            answer = llama.post(path, members)
            assert answer.status_code == status, answer.text
            assert error_of(answer).keys() == {"error"}
            assert words in error_of(answer)["error"]
    assert change["nv_inference_request_failure"] == 2
    assert change["nv_inference_request_success"] == 0
    llama.expect_answer()


def test_a_disconnect_stops_its_own_request_and_no_other(server: Serving, llama: Llama) -> None:
    with Connection(server.ports["http"]) as leaving, Connection(server.ports["http"]) as staying:
        for client in (leaving, staying):
            client.ask(GENERATE_STREAM, {"openai_request": ENDLESS})
            client.head()
        leaving.close()
        wait_in_engine(server, lambda: figures(server)[RUNNING] == 1, "the engine has one")
        assert staying.chunk()
    wait_at_rest(server)
    llama.expect_answer()


def test_a_disconnect_before_the_whole_answer_stops_the_engine(
    server: Serving, llama: Llama
) -> None:
    with changes(server) as change:
        with Connection(server.ports["http"]) as client:
            asked = {"openai_request": {**ENDLESS, "stream": False}}
            client.ask("/v2/models/llama/generate", asked)
            wait_until(lambda: figures(server)[RUNNING] == 1, "the engine has it")
        wait_at_rest(server)
    assert change["nv_inference_request_failure"] == change["CANCELED"] == 1
    assert change["gateway_wasted_tokens_total"] <= change["vllm:generation_tokens_total"]
    llama.expect_answer()
