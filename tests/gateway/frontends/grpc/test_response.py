"""Responses to messages (protocol 9, 12.3, 18.5, 19.3)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc import response as encoding
from gateway.frontends.grpc.response import InferResponseEncoder
from gateway.messages import (
    InferRequest,
    InferResponse,
    RequestedOutput,
    SharedRegion,
    responses_of_texts,
)
from gateway.protos import grpc_service_pb2 as pb
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor
from tests.builders import TEXT, ScriptedInstance
from tests.conftest import Serve
from tests.regions import path_of, shared_object

CONFIG = replace(TEXT, name="m")
SCORES = array_tensor("Y", Datatype.FP32, np.array([[0.5, 0.9, 0.1]], np.float32))


def encoder(
    serve: Serve,
    *outputs: RequestedOutput,
    config: ModelConfig = CONFIG,
    shared_memory: SharedMemory | None = None,
) -> InferResponseEncoder:
    request = InferRequest(model="m", id="r1", outputs=outputs)
    model = serve(ScriptedInstance(), config=config)
    return InferResponseEncoder(request, model, shared_memory or SharedMemory())


def encode(found: InferResponseEncoder, *outputs: Tensor, **fields: Any) -> pb.ModelInferResponse:
    return pb.ModelInferResponse.FromString(found.encode(InferResponse(outputs=outputs, **fields)))


async def test_a_response_has_one_raw_entry_per_output_in_order(serve: Serve) -> None:
    found = encode(
        encoder(serve),
        text_tensor("T", ["a", "bc"]),
        array_tensor("N", Datatype.INT16, np.array([[1, -2]])),
        Tensor("E", Datatype.FP32, (0, 4), b""),
    )
    assert (found.model_name, found.model_version, found.id) == ("m", "1", "r1")
    assert [(each.name, each.datatype, list(each.shape)) for each in found.outputs] == [
        ("T", "BYTES", [2]),
        ("N", "INT16", [1, 2]),
        ("E", "FP32", [0, 4]),
    ]
    assert list(found.raw_output_contents) == [
        b"\x01\0\0\0a\x02\0\0\0bc",
        b"\x01\0\xfe\xff",
        b"",
    ]
    assert not any(each.HasField("contents") for each in found.outputs)
    assert not found.parameters


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 2**21])
async def test_raw_contents_of_any_size_arrive_complete(serve: Serve, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    found = encode(encoder(serve), Tensor("Y", Datatype.UINT8, (size,), memoryview(data)))
    assert list(found.raw_output_contents) == [data]


async def test_response_parameters_keep_their_kind(serve: Serve) -> None:
    parameters = {"b": True, "i": -5, "d": 0.5, "s": "x"}
    found = encode(encoder(serve), parameters=parameters).parameters
    assert {key: value.WhichOneof("parameter_choice") for key, value in found.items()} == {
        "b": "bool_param",
        "i": "int64_param",
        "d": "double_param",
        "s": "string_param",
    }
    assert (found["b"].bool_param, found["i"].int64_param) == (True, -5)
    assert (found["d"].double_param, found["s"].string_param) == (0.5, "x")


async def test_a_response_larger_than_a_message_is_an_error(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(InferenceError) as caught:
        encode(encoder(serve), Tensor("Y", Datatype.UINT8, (200,), bytes(200)))
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.endswith("exceeds gRPC's byte size limit 100.")


async def test_a_classified_output_is_text(serve: Serve) -> None:
    found = encode(
        encoder(serve, RequestedOutput("Y", classes=2), config=replace(CONFIG, max_batch_size=1)),
        SCORES,
    )
    assert (found.outputs[0].datatype, list(found.outputs[0].shape)) == ("BYTES", [1, 2])
    assert list(found.raw_output_contents) == [b"\x0a\0\0\x000.900000:1\x0a\0\0\x000.500000:0"]


async def test_an_output_in_shared_memory_has_an_empty_raw_entry(serve: Serve) -> None:
    shared_memory = SharedMemory(allowed=True)
    with shared_object(bytes(32)) as key:
        shared_memory.register_system("region", key, 0, 32)
        region = shared_memory.locate(SharedRegion("region", 16, offset=8))
        found = encode(
            encoder(serve, RequestedOutput("Y", region=region), shared_memory=shared_memory),
            SCORES,
            text_tensor("T", ["a"]),
        )
        assert list(found.raw_output_contents) == [b"", b"\x01\0\0\0a"]
        assert list(found.outputs[0].shape) == [1, 3]
        assert path_of(key).read_bytes() == bytes(8) + bytes(SCORES.raw()) + bytes(12)


async def test_an_output_must_fit_its_part_of_shared_memory(serve: Serve) -> None:
    shared_memory = SharedMemory(allowed=True)
    with shared_object(bytes(32)) as key:
        shared_memory.register_system("region", key, 0, 32)
        wanted = RequestedOutput("Y", region=SharedRegion("region", 8))
        with pytest.raises(InferenceError) as caught:
            encode(encoder(serve, wanted, shared_memory=shared_memory), SCORES)
        assert path_of(key).read_bytes() == bytes(32)
    assert (caught.value.code, caught.value.message) == (
        Code.INTERNAL,
        "shared memory size specified with the request for output 'Y' (8 bytes) should be at "
        "least 12 bytes to hold the results",
    )


@pytest.mark.parametrize("final", [True, False])
async def test_a_streamed_response_has_the_final_flag(serve: Serve, final: bool) -> None:
    response = InferResponse(outputs=(SCORES,), parameters={"n": 1}, final=final)
    found = pb.ModelStreamInferResponse.FromString(encoder(serve).encode_streamed(response))
    assert found.error_message == ""
    inner = found.infer_response
    assert (inner.model_name, inner.model_version, inner.id) == ("m", "1", "r1")
    assert inner.parameters["triton_final_response"].bool_param is final
    assert inner.parameters["n"].int64_param == 1
    assert list(inner.raw_output_contents) == [bytes(SCORES.raw())]


async def test_an_empty_final_response_names_the_version_asked_for(serve: Serve) -> None:
    streamed = encoder(serve).encode_streamed(InferResponse(final=True))
    found = pb.ModelStreamInferResponse.FromString(streamed).infer_response
    assert (found.model_name, found.model_version, found.id) == ("m", "", "r1")
    assert found.parameters["triton_final_response"].bool_param
    assert not found.outputs


@pytest.mark.parametrize("size", [0, 1, 60, 127, 128, 16383, 16384])
async def test_texts_are_encoded_as_their_responses(serve: Serve, size: int) -> None:
    found, texts = encoder(serve), (bytes(size), b"x" * size)
    responses = responses_of_texts("T", texts, (1, None))
    assert found.encode_texts("T", texts) == [found.encode_streamed(each) for each in responses]


async def test_texts_of_a_classified_output_are_no_plain_texts(serve: Serve) -> None:
    found = encoder(serve, RequestedOutput("Y", classes=2), RequestedOutput("T"))
    assert found.encode_texts("Y", (b"a",)) is None
    assert found.encode_texts("T", (b"a",)) is not None
