"""OpenAI's endpoints by the official client, on models in Python and on scripted ones."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.openai_models import write_repository
from tests.leaving import IN_FLIGHT, noticed
from tests.raw import Connection
from tests.serving import WAIT_SECS, Serving

pytestmark = pytest.mark.runs_on("frontends")

FLAGS = (
    "--exit-on-error=false",
    "--strict-readiness=false",
    "--http-first-response-secs=0.3",
    "--http-max-input-size=1000000",
)
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
DONE = b"data: [DONE]\n\n"
NOTICED_SECS = 1


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of this module."""
    folder = tmp_path_factory.mktemp("openai")
    write_repository(folder)
    return folder


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(
        base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=WAIT_SECS
    ) as found:
        yield found


@pytest.fixture
async def aio(server: Serving) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client for asyncio, by the paths of KServe's clients."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.http}/openai/v1", api_key="none", max_retries=0, timeout=WAIT_SECS
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def _good_request_afterwards(http: httpx.Client) -> Iterator[None]:
    yield
    answer = http.post(CHAT, json=asking("good"))
    assert answer.json()["choices"][0]["message"]["content"] == "good "


def says(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def asking(text: str, model: str = "openai_python", **members: Any) -> dict[str, Any]:
    return {"model": model, "messages": says(text), **members}


# Answers.


def test_a_chat_completion(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="openai_python", messages=says("a b c"))
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "a b c ")
    assert (choice.finish_reason, found.object) == ("stop", "chat.completion")
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 3)


def test_a_streamed_chat_completion_is_the_same_text(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="openai_python", messages=says("a b c")) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_completion()
    assert found.choices[0].message.content == "a b c "
    assert (found.choices[0].finish_reason, kinds.count("content.delta")) == ("stop", 4)


def test_usage_is_sent_in_a_chunk_of_its_own_on_request(client: openai.OpenAI) -> None:
    asked: Any = {"model": "openai_python", "messages": says("a b"), "stream": True}
    plain = list(client.chat.completions.create(**asked))
    assert [chunk.usage for chunk in plain] == [None] * 4
    *chunks, last = client.chat.completions.create(**asked, stream_options={"include_usage": True})
    assert len(chunks) == len(plain)
    assert (last.choices, last.usage.total_tokens) == ([], 4)


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="openai_python", prompt="x y")
    assert (whole.choices[0].text, whole.object) == ("x y ", "text_completion")
    stream = client.completions.create(model="openai_python", prompt="x y", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "x y "


async def test_the_client_for_asyncio_by_the_other_prefix(aio: openai.AsyncOpenAI) -> None:
    whole, stream = await asyncio.gather(
        aio.chat.completions.create(model="openai_python", messages=says("a b")),
        aio.chat.completions.create(model="openai_python", messages=says("c d"), stream=True),
    )
    assert whole.choices[0].message.content == "a b "
    deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(deltas) == "c d "


def test_many_streams_at_once_stay_apart(server: Serving) -> None:
    async def ask(http: httpx.AsyncClient, number: int) -> bool:
        text = f"word{number} " * 50
        answer = await http.post(CHAT, json=asking(text, stream=True))
        return answer.text.count(f'"word{number} "') == 50 and answer.content.endswith(DONE)

    async def ask_all() -> list[bool]:
        async with httpx.AsyncClient(base_url=server.http, timeout=WAIT_SECS) as http:
            return await asyncio.gather(*(ask(http, number) for number in range(32)))

    assert asyncio.run(ask_all()) == [True] * 32


def test_events_with_names_are_those_of_responses(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="speaker", input="x", stream=True)
    assert [event.type for event in stream] == ["response.created", "response.output_text.delta"]


def test_the_bytes_of_a_stream_of_responses(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"model": "speaker", "stream": True})
    assert answer.content == (
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'
        b"event: response.output_text.delta\n"
        b'data: {"type":"response.output_text.delta","delta":"hi","sequence_number":1}\n\n'
    )


def test_the_same_request_by_v2_has_the_same_chunks(http: httpx.Client) -> None:
    asked = asking("a b", model="adapted")
    body = {"openai_request": asked, "openai_endpoint": "chat/completions"}
    other = http.post("/v2/models/adapted/generate_stream", json=body)
    assert other.text.count('"openai_response":') == 1
    assert http.post(CHAT, json=asked).text == '{"object":"chat.completion","id":"x","choices":[]}'


# Models.


def test_the_models_are_those_that_the_other_endpoints_know(client: openai.OpenAI) -> None:
    found = {model.id: model.model_dump() for model in client.models.list()}
    assert {"openai_python", "encoder", "adapted", "formal", "org/rude"} <= found.keys()
    assert not {"plain", "broken_names"} & found.keys()
    assert found["formal"]["parent"] == "adapted"
    assert found["adapted"]["max_model_len"] == 77
    assert {model["owned_by"] for model in found.values()} == {"sluice"}
    assert all(0 <= time.time() - model["created"] < 600 for model in found.values())


def test_one_model_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve("openai_python").object == "model"
    assert client.models.retrieve("org/rude").id == "org/rude"
    with pytest.raises(openai.NotFoundError, match="The model `nope` does not exist"):
        client.models.retrieve("nope")


def test_an_adapter_is_asked_by_its_name(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="org/rude", messages=says("x")).id == "x"


def test_names_that_are_no_list_keep_a_model_from_loading(server: Serving) -> None:
    server.wait_logged("parameter 'openai_names' of model 'broken_names' is 'not JSON'")


# Embeddings.


def test_embeddings(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="encoder", input=["one", "and two"])
    assert [each.embedding for each in found.data] == [[3, 1, 0], [7, 2, 0]]
    assert [each.index for each in found.data] == [0, 1]
    assert (found.usage.prompt_tokens, found.model) == (3, "encoder")


def test_embeddings_as_numbers_with_fewer_dimensions(client: openai.OpenAI) -> None:
    found = client.embeddings.create(
        model="encoder", input="abc", encoding_format="float", dimensions=2
    )
    assert found.data[0].embedding == pytest.approx([3 / 10**0.5, 1 / 10**0.5])


def test_as_many_texts_as_openai_takes(client: openai.OpenAI, server: Serving) -> None:
    texts = ["x" * (1 + index % 50) for index in range(2048)]
    before = server.metric("nv_inference_request_success", "encoder")
    found = client.embeddings.create(model="encoder", input=texts)
    assert [each.embedding[0] for each in found.data] == [len(text) for text in texts]
    after = server.metric("nv_inference_request_success", "encoder")
    assert after - before == 2048
    with pytest.raises(openai.BadRequestError, match="has 2049 texts, expected at most 2048"):
        client.embeddings.create(model="encoder", input=[*texts, "x"])


# Refusals.

Ask = Callable[[openai.OpenAI], Any]
REFUSALS: Mapping[str, tuple[Ask, type[openai.APIStatusError], str]] = {
    "unknown model": (
        lambda client: client.chat.completions.create(model="nope", messages=says("x")),
        openai.NotFoundError,
        "The model `nope` does not exist.",
    ),
    "a model without the contract": (
        lambda client: client.chat.completions.create(model="plain", messages=says("x")),
        openai.BadRequestError,
        "does not serve chat/completions: it lacks the input 'openai_request'",
    ),
    "a model that does not embed": (
        lambda client: client.embeddings.create(model="plain", input="x"),
        openai.BadRequestError,
        "does not serve embeddings",
    ),
    "an encoder that does not chat": (
        lambda client: client.chat.completions.create(model="encoder", messages=says("x")),
        openai.BadRequestError,
        "does not serve chat/completions",
    ),
    "the model's own refusal": (
        lambda client: client.chat.completions.create(model="openai_python", messages=[]),
        openai.BadRequestError,
        "the request has no text",
    ),
    "an endpoint that the model refuses": (
        lambda client: client.responses.create(model="openai_python", input="x"),
        openai.BadRequestError,
        "responses is not served by this model",
    ),
    "a crash": (
        lambda client: client.chat.completions.create(model="crashing", messages=says("x")),
        openai.InternalServerError,
        "model 'crashing' failed unexpectedly; the server's log says why",
    ),
    "silence": (
        lambda client: client.chat.completions.create(model="silent", messages=says("x")),
        openai.InternalServerError,
        "expected a single response, got 0",
    ),
    "busy": (
        lambda client: client.chat.completions.create(model="busy", messages=says("x")),
        openai.InternalServerError,
        "come back later",
    ),
    "a model that did not load": (
        lambda client: client.chat.completions.create(model="broken_names", messages=says("x")),
        openai.NotFoundError,
        "The model `broken_names` does not exist.",
    ),
    "token ids": (
        lambda client: client.embeddings.create(model="encoder", input=[1, 2, 3]),
        openai.BadRequestError,
        "token ids",
    ),
    "too many dimensions": (
        lambda client: client.embeddings.create(model="encoder", input="x", dimensions=4),
        openai.BadRequestError,
        "expected a number from 1 to 3",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_the_error_that_the_client_knows(client: openai.OpenAI, name: str) -> None:
    ask, kind, message = REFUSALS[name]
    with pytest.raises(kind) as caught:
        ask(client)
    error = caught.value
    assert message in error.message
    assert isinstance(error.body, dict)
    assert error.body.keys() == {"message", "type", "param", "code"}
    assert error.body["code"] == error.status_code
    assert error.request_id


def test_a_busy_model_answers_with_retry_after(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=asking("x", model="busy"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "an object is expected"),
        (b'{"model":"\xff"}', "not valid JSON"),
        (b'{"model":["openai_python"]}', "`model` is no text"),
        (b'{"messages":[]}', "`model` is missing"),
        (b'{"model":"openai_python","stream":"yes"}', "`stream` is"),
        (b'{"model":"openai_python","messages":7}', "the request has no text"),
        (b'{"model":"openai_python","messages":[{"content":[1]}]}', "the request has no text"),
        (b'{"model":"%b"}' % (b"x" * 1_000_000), "exceeds the maximum allowed input size"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_a_bad_body_is_a_bad_request(
    http: httpx.Client, body: bytes, encoding: str, message: str
) -> None:
    content = gzip.compress(body) if encoding == "gzip" else body
    if encoding == "gzip":
        message = message.replace("exceeds the maximum allowed input", "exceeds the maximum")
        message = message.removesuffix(" size")
    answer = http.post(CHAT, content=content, headers={**JSON, "Content-Encoding": encoding})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
    assert message in answer.json()["error"]["message"]


def test_a_compressed_request_is_answered(http: httpx.Client) -> None:
    body = gzip.compress(b'{"model":"openai_python","messages":[{"content":"zip"}]}')
    answer = http.post(CHAT, content=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert answer.json()["choices"][0]["message"]["content"] == "zip "


# Streams.


def test_an_error_in_mid_stream_is_raised_after_what_came_before(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="breaking", messages=says("x"), stream=True)
    assert next(stream).choices[0].delta.content == "one"
    with pytest.raises(openai.APIError, match="and then it broke"):
        next(stream)


def test_the_bytes_of_an_error_in_mid_stream(http: httpx.Client) -> None:
    answer = http.post(CHAT, json=asking("x", model="breaking", stream=True))
    assert answer.status_code == 200
    assert answer.content.endswith(
        b'data: {"error":{"message":"and then it broke","type":"InternalServerError",'
        b'"param":null,"code":500}}\n\n' + DONE
    )


@pytest.mark.parametrize(("model", "status"), [("crashing", 500), ("busy", 503), ("nope", 404)])
def test_an_error_before_the_first_chunk_has_its_status(
    http: httpx.Client, model: str, status: int
) -> None:
    answer = http.post(CHAT, json=asking("x", model=model, stream=True))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)


def test_headers_do_not_wait_for_a_slow_model(server: Serving) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.ask(CHAT, asking("x", model="late", stream=True))
        assert connection.head().status == 200
        body = b"".join(iter(connection.chunk, b""))
    assert b'"content":"late"' in body
    assert body.endswith(DONE)


def test_the_response_has_the_id_of_its_request(client: openai.OpenAI, http: httpx.Client) -> None:
    ask = client.chat.completions.with_raw_response.create
    asked: Any = {"model": "openai_python", "messages": says("x")}
    assert ask(**asked, extra_headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert len(ask(**asked).headers["x-request-id"]) == 32
    answer = http.post(CHAT, json=asking("x", stream=True), headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


def test_a_cut_stream_with_a_key_resumes_at_the_cut(server: Serving, http: httpx.Client) -> None:
    asked = asking("a b c d", stream=True)
    headers = {"Idempotency-Key": "cut"}
    whole = http.post(CHAT, json=asked, headers=headers)
    with Connection(server.ports["http"]) as connection:
        connection.ask(CHAT, asked, "Idempotency-Key: cut-2")
        token = connection.head().headers["sluice-stream"]
        connection.chunk()
    rest = http.post(CHAT, headers={"Last-Event-ID": f"{token}.1"})
    contents = [texts_of(answer.content) for answer in (whole, rest)]
    assert contents == [["", "a ", "b ", "c ", "d ", None], ["a ", "b ", "c ", "d ", None]]


def texts_of(body: bytes) -> list[str | None]:
    """The text of each chunk of a chat completion."""
    lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    return [json.loads(line)["choices"][0]["delta"].get("content") for line in lines]


def test_a_client_that_leaves_in_mid_stream_stops_its_model(
    server: Serving, client: openai.OpenAI
) -> None:
    with noticed(server, "endless", NOTICED_SECS):
        stream = client.chat.completions.create(model="endless", messages=says("x"), stream=True)
        next(stream)
        server.wait_metric(IN_FLIGHT, "endless", 1)
        stream.close()


def test_a_client_that_leaves_before_its_answer_stops_its_model(server: Serving) -> None:
    with noticed(server, "endless", NOTICED_SECS), Connection(server.ports["http"]) as connection:
        connection.ask(CHAT, asking("x", model="endless"))
        server.wait_metric(IN_FLIGHT, "endless", 1)


def test_a_stream_that_is_cancelled_by_its_id_says_so(
    server: Serving, http: httpx.Client, client: openai.OpenAI
) -> None:
    create = client.chat.completions.create
    named = {"extra_headers": {"X-Request-Id": "mine"}}
    stream = create(model="endless", messages=says("x"), stream=True, **named)
    next(stream)
    assert http.post("/v2/models/endless/requests/mine/cancel").status_code == 200
    with pytest.raises(openai.APIError, match="Request was cancelled"):
        for _ in stream:
            pass
    server.wait_metric(IN_FLIGHT, "endless", 0)


def test_an_answer_that_is_cancelled_by_its_id_is_an_error(
    server: Serving, http: httpx.Client
) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.ask(CHAT, asking("x", model="endless"), "X-Request-Id: mine")
        server.wait_metric(IN_FLIGHT, "endless", 1)
        assert http.post("/v2/models/endless/requests/mine/cancel").status_code == 200
        answer = connection.answer()
    assert (answer.status, answer.json["error"]["message"]) == (499, "Request was cancelled")
