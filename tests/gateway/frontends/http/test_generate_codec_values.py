"""Values of the generate extension: JSON to tensors and back, and tags of conversations."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.config.scheduling import SequenceBatching
from gateway.errors import Code, InferenceError
from gateway.frontends.http.generate_codec import (
    GenerateEncoder,
    fit_shape,
)
from gateway.messages import InferResponse, SequenceTag, response_of_text
from gateway.stream import INTERRUPTED, has_data
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor
from tests.builders import FLAG, text_response
from tests.gateway.frontends.http.generate_requests import LLM, decode, refusal

INTEGERS = ("INT8", "INT16", "INT32", "INT64")


UNSIGNED = ("UINT8", "UINT16", "UINT32", "UINT64")


def taking(data_type: str, dims: tuple[int, ...] = (-1,), max_batch_size: int = 0) -> ModelConfig:
    """A model with one input `X`."""
    tensor = ModelInput(name="X", data_type=DataType(f"TYPE_{data_type}"), dims=dims)
    return ModelConfig(name="m", max_batch_size=max_batch_size, input=(tensor,))


# JSON value to tensor (protocol 10.2).


@pytest.mark.parametrize(
    ("shape", "count", "fitted"),
    [
        ((1,), 1, (1,)),
        ((-1, 1), 1, (1, 1)),
        ((-1, 1), 2, (2, 1)),
        ((-1, -1), 3, (1, 3)),
        ((-1,), 1, (1,)),
        ((-1, 16), 32, (2, 16)),
        ((2, 3), 6, (2, 3)),
        ((-1, 2, 3), 6, (1, 2, 3)),
        ((-1, -1, 4), 8, (1, 2, 4)),
        ((-1,), 0, (0,)),
        ((), 1, ()),
    ],
)
def test_elements_fill_the_shape_from_behind(
    shape: tuple[int, ...], count: int, fitted: tuple[int, ...]
) -> None:
    assert fit_shape(shape, count, "X") == fitted


@pytest.mark.parametrize(
    ("shape", "count"), [((-1, 16), 31), ((2,), 3), ((1,), 2), ((2, 3), 12), ((), 2), ((2, 2), 2)]
)
def test_elements_that_do_not_fit_are_refused(shape: tuple[int, ...], count: int) -> None:
    with pytest.raises(InferenceError) as caught:
        fit_shape(shape, count, "X")
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        "The schema can not convert input 'X' to tensor with proper shape"
    )


@pytest.mark.parametrize(
    ("config", "value", "shape"),
    [
        (taking("STRING", (1,)), "hi", (1,)),
        (taking("STRING", (1,), max_batch_size=8), "hi", (1, 1)),
        (taking("STRING", (1,), max_batch_size=8), ["hi"], (1, 1)),
        (taking("STRING", (1,), max_batch_size=8), ["a", "b"], (2, 1)),
        (taking("INT32", (-1,), max_batch_size=8), [1, 2, 3], (1, 3)),
        (taking("INT32"), 5, (1,)),
        (taking("FP32", (16,), max_batch_size=8), [0.5] * 32, (2, 16)),
        (taking("INT32"), [], (0,)),
    ],
)
def test_a_value_takes_the_shape_that_the_model_wants(
    config: ModelConfig, value: object, shape: tuple[int, ...]
) -> None:
    (tensor,) = decode(config, X=value).inputs
    assert tensor.shape == shape


@pytest.mark.parametrize(
    ("data_type", "value", "elements"),
    [
        *((kind, [1, -1, 0], [1, -1, 0]) for kind in INTEGERS),
        *((kind, [1, 255, 0], [1, 255, 0]) for kind in UNSIGNED),
        ("INT8", [128, -129, 256], [-128, 127, 0]),
        ("UINT8", [256, 257], [0, 1]),
        ("INT64", [2**63 - 1, -(2**63)], [2**63 - 1, -(2**63)]),
        ("UINT64", [2**64 - 1], [2**64 - 1]),
        ("FP32", [1, 0.5, -2], [1.0, 0.5, -2.0]),
        ("FP64", [1, 0.1], [1.0, 0.1]),
        ("BOOL", [True, False], [True, False]),
    ],
)
def test_a_value_becomes_elements_of_the_datatype(
    data_type: str, value: list[object], elements: list[object]
) -> None:
    (tensor,) = decode(taking(data_type), X=value).inputs
    assert tensor.array().tolist() == elements
    assert (tensor.name, tensor.datatype) == ("X", Datatype(data_type))


def test_strings_become_bytes_in_utf8() -> None:
    (tensor,) = decode(taking("STRING"), X=["a", "\u00e9", ""]).inputs
    assert tensor.elements() == (b"a", b"\xc3\xa9", b"")


@pytest.mark.parametrize(
    ("data_type", "value", "text"),
    [
        *((kind, 1.0, "signed-integer as signed-integer") for kind in INTEGERS),
        *((kind, True, "signed-integer as signed-integer") for kind in INTEGERS),
        *((kind, "1", "signed-integer as signed-integer") for kind in INTEGERS),
        *((kind, -1, "unsigned-integer as unsigned-integer") for kind in UNSIGNED),
        *((kind, 1.0, "unsigned-integer as unsigned-integer") for kind in UNSIGNED),
        *((kind, False, "unsigned-integer as unsigned-integer") for kind in UNSIGNED),
        ("FP32", "1", "number as double"),
        ("FP32", True, "number as double"),
        ("FP64", None, "number as double"),
        ("FP64", [1.0, [2.0]], "number as double"),
        ("BOOL", 1, "boolean as boolean"),
        ("BOOL", "true", "boolean as boolean"),
        ("BOOL", [True, 0], "boolean as boolean"),
    ],
)
def test_a_value_of_another_kind_is_an_internal_error(
    data_type: str, value: object, text: str
) -> None:
    assert refusal(taking(data_type), X=value) == (
        Code.INTERNAL,
        f"Unable to parse 'data': attempt to access JSON non-{text}",
    )


@pytest.mark.parametrize("value", [1, 1.5, True, None, ["a", 1]])
def test_a_string_is_a_string(value: object) -> None:
    assert refusal(taking("STRING"), X=value) == (
        Code.INTERNAL,
        "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
    )


@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
def test_half_precision_does_not_come_by_json(data_type: str) -> None:
    assert refusal(taking(data_type), X=1.0) == (
        Code.INVALID_ARG,
        f"receiving {data_type} data via JSON is not supported. Please use the binary data format "
        "for input X",
    )


@pytest.mark.parametrize("value", [{"model": "llama", "n": 1}, [{"role": "user", "content": "hi"}]])
def test_json_for_a_bytes_input_travels_as_text(value: object) -> None:
    (tensor,) = decode(taking("STRING", (1,)), X=value).inputs
    assert tensor.shape == (1,)
    assert json.loads(tensor.elements()[0]) == value


# Response tensor to JSON value (protocol 10.3).


def encoded(*outputs: Tensor, request_id: str = "", **parameters: Any) -> str:
    response = InferResponse(outputs=outputs, parameters=parameters)
    return GenerateEncoder("m", "1", request_id).encode(response).decode()


def numbers(datatype: Datatype, values: list[object], name: str = "Y") -> Tensor:
    return array_tensor(name, datatype, np.array(values))


def test_a_response_is_one_compact_object() -> None:
    response = text_response("hello")
    assert GenerateEncoder("llm", "1", "r1").encode(response) == (
        b'{"id":"r1","model_name":"llm","model_version":"1","text_output":"hello"}'
    )


def test_an_id_is_returned_only_if_there_was_one() -> None:
    assert encoded(text_tensor("text_output", ["hi"])) == (
        '{"model_name":"m","model_version":"1","text_output":"hi"}'
    )


@pytest.mark.parametrize(
    ("outputs", "parameters", "text"),
    [
        (
            [text_tensor("a", ["x"])],
            {},
            '{"a":"x","id":"r","model_name":"m","model_version":"1"}',
        ),
        (
            [text_tensor("OUTPUT0", ["x"])],
            {},
            '{"OUTPUT0":"x","id":"r","model_name":"m","model_version":"1"}',
        ),
        (
            [text_tensor("z", ["x"]), text_tensor("Y", ["y"])],
            {"p": 1, "b": True},
            '{"Y":"y","b":true,"id":"r","model_name":"m","model_version":"1","p":1,"z":"x"}',
        ),
    ],
    ids=["before all", "upper case", "many"],
)
def test_keys_are_sorted(outputs: list[Tensor], parameters: dict[str, Any], text: str) -> None:
    assert encoded(*outputs, request_id="r", **parameters) == text


@pytest.mark.parametrize(
    ("output", "value"),
    [
        (numbers(Datatype.INT32, [5]), "5"),
        (numbers(Datatype.INT32, [[1, 2], [3, 4]]), "[1,2,3,4]"),
        (numbers(Datatype.INT64, [2**63 - 1]), "9223372036854775807"),
        (numbers(Datatype.UINT64, [2**64 - 1]), "18446744073709551615"),
        (numbers(Datatype.FP32, [0.1]), "0.10000000149011612"),
        (numbers(Datatype.FP32, [1]), "1.0"),
        (numbers(Datatype.FP64, [0.1, 1]), "[0.1,1.0]"),
        (numbers(Datatype.FP32, [float("nan")]), "NaN"),
        (numbers(Datatype.FP64, [float("inf"), float("-inf")]), "[Infinity,-Infinity]"),
        (numbers(Datatype.BOOL, [True, False]), "[true,false]"),
        (numbers(Datatype.INT32, []), "[]"),
        (text_tensor("Y", []), "[]"),
        (text_tensor("Y", ["a", "b"]), '["a","b"]'),
        (text_tensor("Y", ['"\n\u00e9']), '"\\"\\n\u00e9"'),
        (Tensor("Y", Datatype.BYTES, (1,), b"\x02\0\0\0hi"), '"hi"'),
        (Tensor("Y", Datatype.BYTES, (1,), (b"\xff",)), '"\ufffd"'),
    ],
)
def test_one_element_is_a_scalar_and_any_other_number_a_flat_list(
    output: Tensor, value: str
) -> None:
    text = encoded(output)
    assert f'"Y":{value}' in text
    assert set(json.loads(text)) == {"Y", "model_name", "model_version"}


@pytest.mark.parametrize("datatype", [Datatype.FP16, Datatype.BF16])
def test_half_precision_does_not_leave_by_json(datatype: Datatype) -> None:
    with pytest.raises(InferenceError) as caught:
        encoded(Tensor("Y", datatype, (1,), b"\0\0"))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        f"sending {datatype} data via JSON is not supported. Please use the binary data format "
        "for output"
    )


def test_an_encoder_serves_many_responses() -> None:
    encoder = GenerateEncoder("m", "1", "")
    found = [encoder.encode(text_response(text)) for text in ("a", "b")]
    assert [json.loads(each)["text_output"] for each in found] == ["a", "b"]


@pytest.mark.parametrize("name", ["text_output", "a_text", "model_version"])
@pytest.mark.parametrize("text", [b"", b'a "word"\n', "😀é".encode(), b"\xf0\x9f", b"x" * 4096])
def test_an_element_is_encoded_as_its_response(name: str, text: bytes) -> None:
    encoder = GenerateEncoder("m", "1", "r")
    found = encoder.encode_element(name, text)
    assert found == encoder.encode_text(response_of_text(name, text, 1))
    assert (found is None) == (name != "text_output")
    assert encoder.encode_element(name, b"x" * 4097) is None


@pytest.mark.parametrize(
    ("response", "data"),
    [
        (FLAG, False),
        (text_response("x", final=True), True),
        (text_response("x"), True),
        (InferResponse(), True),
    ],
)
def test_the_flag_alone_is_no_data(response: InferResponse, data: bool) -> None:
    assert has_data(response) is data


# Conversations.


CHAT = replace(
    LLM,
    input=(*LLM.input, ModelInput(name="messages", data_type=DataType.TYPE_STRING, dims=(1,))),
)


@pytest.mark.parametrize("conversation", [7, "x"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_chat_model_gets_the_place_of_a_request_in_its_conversation(
    conversation: int | str, nested: bool
) -> None:
    tags = {"sequence_id": conversation, "sequence_start": True, "sequence_end": False}
    members = {"parameters": {**tags, "temperature": 0}} if nested else {**tags, "temperature": 0}
    request = decode(CHAT, messages="[]", **members)
    assert request.sequence == SequenceTag(conversation, start=True, end=False)
    assert request.parameters == {"temperature": 0}


@pytest.mark.parametrize("tags", [{"sequence_id": 0}, {"sequence_id": ""}, {"sequence_end": True}])
def test_without_an_id_there_is_no_conversation(tags: dict[str, Any]) -> None:
    request = decode(CHAT, messages="[]", **tags)
    assert (request.sequence, request.parameters) == (None, {})


@pytest.mark.parametrize(
    "config",
    [
        LLM,
        replace(CHAT, sequence_batching=SequenceBatching()),
        replace(CHAT, parameters={"conversation_max": "0"}),
        replace(CHAT, output=()),
    ],
    ids=["no messages", "sequence batcher", "none kept", "no text"],
)
def test_for_other_models_these_are_parameters_as_any(config: ModelConfig) -> None:
    request = decode(config, text_input="x", sequence_id=7, sequence_start=True)
    assert request.sequence is None
    assert request.parameters == {"sequence_id": 7, "sequence_start": True}


@pytest.mark.parametrize(
    ("tags", "code"),
    [
        ({"sequence_id": 1.5}, Code.INTERNAL),
        ({"sequence_id": "x" * 129}, Code.UNSUPPORTED),
        ({"sequence_id": 1, "sequence_start": 1}, Code.INTERNAL),
    ],
)
def test_a_tag_of_another_kind_is_refused(tags: dict[str, Any], code: Code) -> None:
    assert refusal(CHAT, messages="[]", **tags)[0] is code


def test_that_a_request_was_interrupted_is_data() -> None:
    assert has_data(INTERRUPTED)
    encoded = json.loads(GenerateEncoder("m", "1", "a").encode(INTERRUPTED))
    assert encoded == {"cancelled": True, "id": "a", "model_name": "m", "model_version": "1"}
