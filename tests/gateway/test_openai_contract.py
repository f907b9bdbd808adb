"""Tensors of OpenAI's requests: bytes for every model, parsed members for one reader."""

import copy
import pickle
from collections.abc import Callable

import orjson
import pytest

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.openai_contract import REQUEST, Endpoint, RequestBody, read_request, request_tensors
from gateway.tensor import Datatype, Tensor

CONFIG = ModelConfig(name="m")
TEXT = b'{"model":"m"}'
WIRE_FORM = len(TEXT).to_bytes(4, "little") + TEXT


def request_of(data: bytes | tuple[bytes, ...]) -> InferRequest:
    return InferRequest(model="m", inputs=(Tensor(REQUEST, Datatype.BYTES, (1,), data),))


def test_the_first_reader_gets_the_parsed_members_and_the_next_ones_copies() -> None:
    members = {"model": "m"}
    inputs = request_tensors(RequestBody(TEXT, members), Endpoint.CHAT, CONFIG)
    request = InferRequest(model="m", inputs=inputs)
    first, second = (read_request(request) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first[1] is members
    assert first == second == (Endpoint.CHAT, members)
    assert second[1] is not members


def test_a_body_with_members_is_the_same_tensor_as_its_text() -> None:
    with_members, alone = request_of(RequestBody(TEXT, {"model": "m"})), request_of((TEXT,))
    assert with_members == alone
    assert [each.inputs[0].raw() for each in (with_members, alone)] == [WIRE_FORM] * 2


@pytest.mark.parametrize("copied", [copy.copy, lambda body: pickle.loads(pickle.dumps(body))])
def test_a_copied_body_is_the_text_alone(copied: Callable[[RequestBody], object]) -> None:
    assert copied(RequestBody(TEXT, {"model": "m"})) == (TEXT,)


@pytest.mark.parametrize("data", [(TEXT,), RequestBody(TEXT), WIRE_FORM])
def test_a_text_without_members_is_parsed(data: bytes | tuple[bytes, ...]) -> None:
    assert read_request(request_of(data)) == (Endpoint.CHAT, orjson.loads(TEXT))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((b"{",), "input 'openai_request' is not valid JSON: "),
        ((b"[]",), "input 'openai_request' is JSON, but an object is expected in it"),
        ((TEXT, TEXT), "input 'openai_request' has 2 elements, expected 1"),
    ],
)
def test_another_text_is_refused(data: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(InferenceError) as caught:
        read_request(request_of(data))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith(message)
