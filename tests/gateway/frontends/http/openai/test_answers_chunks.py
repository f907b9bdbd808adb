"""The bytes of a model as events, in literal bytes."""

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.http.openai.answers import ChunkEncoder
from gateway.messages import InferResponse
from gateway.openai_contract import Endpoint, OpenAiRefusal
from gateway.tensor import join_elements, text_tensor
from tests.builders import FLAG, text_response
from tests.gateway.frontends.http.openai.conftest import chunk

CHAT = ChunkEncoder("chat", Endpoint.CHAT)
RESPONSES = ChunkEncoder("chat", Endpoint.RESPONSES)


def test_a_chunk_goes_out_as_it_came() -> None:
    text = '{"b" : 1, "a":"\\u00e4 ä",  "a":2}'
    assert CHAT.events([chunk(text)]) == f"data: {text}\n\n".encode()
    assert CHAT.whole(chunk(text)) == text.encode()


def test_chunks_that_wait_are_events_of_one_write() -> None:
    responses = [chunk("{1}"), chunk("{2}"), FLAG]
    assert CHAT.events(responses) == b"data: {1}\n\ndata: {2}\n\n"


def test_the_wire_form_of_bytes_is_a_chunk_too() -> None:
    (output,) = chunk("").outputs
    raw = type(output)(output.name, output.datatype, (1, 1), join_elements([b"{}"]))
    assert CHAT.events([InferResponse(outputs=(raw,))]) == b"data: {}\n\n"


def test_a_named_event_says_its_name_first() -> None:
    expected = b"event: response.created\ndata: {}\n\n"
    assert RESPONSES.events([chunk("{}", "response.created")]) == expected


@pytest.mark.parametrize("text", ["{\n}", "{\r\n}", "{\r}"])
def test_json_on_several_lines_stays_one_event(text: str) -> None:
    assert CHAT.events([chunk(text)]) == b"data: {\ndata: }\n\n"


def test_a_stream_ends_with_done_unless_its_events_have_names() -> None:
    assert CHAT.end == b"data: [DONE]\n\n"
    assert RESPONSES.end == b""


def test_an_error_is_an_event_that_clients_know() -> None:
    error = InferenceError(Code.INTERNAL, "broken")
    body = (
        b'data: {"error":{"message":"broken","type":"InternalServerError","param":null,"code":500}}'
    )
    assert CHAT.failure(error) == body + b"\n\n"
    assert RESPONSES.failure(error) == b"event: error\n" + body + b"\n\n"


def test_an_error_that_the_model_has_written_is_left_as_it_is() -> None:
    error = OpenAiRefusal(Code.INTERNAL, "broken", status=500, body=b'{"error":{}}')
    assert CHAT.failure(error) == b'data: {"error":{}}\n\n'


@pytest.mark.parametrize(
    ("response", "count"),
    [
        (text_response("x"), 0),
        (InferResponse(outputs=(text_tensor("openai_response", ["a", "b"]),)), 2),
    ],
)
def test_a_response_without_the_one_text_is_the_models_mistake(
    response: InferResponse, count: int
) -> None:
    with pytest.raises(InferenceError) as caught:
        CHAT.events([response])
    assert caught.value.code is Code.INTERNAL
    assert f"model 'chat' answered with {count} elements in 'openai_response'" in str(caught.value)
