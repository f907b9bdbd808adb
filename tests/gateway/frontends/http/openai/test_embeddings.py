"""`/v1/embeddings` of a model without the contract: one request for each text."""

import base64
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import ASGIApp

from gateway.admission.admission import Admission
from gateway.backend import Answer, Instance
from gateway.config.data_type import DataType
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.app import build_app
from gateway.frontends.http.openai.embeddings import AT_ONCE, shorten
from gateway.messages import InferRequest, InferResponse
from gateway.policy.tenants import TenantRules, Tenants
from gateway.tensor import Datatype, array_tensor
from tests.builders import LoadedModels, ScriptedInstance, soon
from tests.conftest import Serve
from tests.exchange import Exchange
from tests.gateway.frontends.http.conftest import Open
from tests.gateway.frontends.http.openai.conftest import (
    CHAT,
    ENCODER,
    SETTINGS,
    app_of,
    body,
    tensor_out,
)

PATH = "/v1/embeddings"
LARGE = replace(SETTINGS, max_input_size=100_000)
TELLING = replace(
    ENCODER, output=(*ENCODER.output, tensor_out("num_input_tokens", DataType.TYPE_UINT32))
)


class EncoderInstance(Instance):
    """Embeds a text of n characters as (n, 1, 2, 2); refuses those that begin with `bad`."""

    concurrency = None

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        for index, request in enumerate(requests):
            text = request.inputs[0].elements()[0].decode()
            self.texts.append(text)
            yield index, self._answer(text)

    def _answer(self, text: str) -> InferResponse | InferenceError:
        if text.startswith("bad"):
            return InferenceError(Code.INVALID_ARG, f"'{text}' is too long")
        vector = np.array([[len(text), 1, 2, 2]], np.float32)
        count = np.array([[len(text.split())]], np.uint32)
        outputs = (
            array_tensor("embedding", Datatype.FP32, vector),
            array_tensor("num_input_tokens", Datatype.UINT32, count),
        )
        return InferResponse(outputs=outputs, final=True)

    async def close(self) -> None:
        """Nothing is held."""


async def embed(
    connect: Open, app: ASGIApp, given: Any, model: str = "encoder", **members: Any
) -> httpx.Response:
    return await soon(connect(app).post(PATH, content=body(model=model, input=given, **members)))


@pytest.fixture
async def app(serve: Serve) -> ASGIApp:
    """A server with the model `encoder`."""
    return app_of(serve(EncoderInstance(), config=ENCODER), settings=LARGE)


async def test_embeddings_come_in_the_order_of_the_texts(connect: Open, app: ASGIApp) -> None:
    found = await embed(connect, app, ["a", "abc"])
    assert found.status_code == 200
    members = found.json()
    assert members["data"] == [
        {"object": "embedding", "index": 0, "embedding": [1.0, 1.0, 2.0, 2.0]},
        {"object": "embedding", "index": 1, "embedding": [3.0, 1.0, 2.0, 2.0]},
    ]
    assert (members["object"], members["model"]) == ("list", "encoder")
    assert members["usage"] == {"prompt_tokens": 0, "total_tokens": 0}
    assert members["id"] == f"embd-{found.headers['x-request-id']}"


async def test_a_single_text_needs_no_list_and_no_model(connect: Open, app: ASGIApp) -> None:
    found = (await embed(connect, app, "ab", model="")).json()
    assert ([each["embedding"] for each in found["data"]], found["model"]) == (
        [[2.0, 1.0, 2.0, 2.0]],
        "encoder",
    )


async def test_base64_is_little_endian_fp32(connect: Open, app: ASGIApp) -> None:
    found = (await embed(connect, app, "ab", encoding_format="base64")).json()
    decoded = np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4")
    assert decoded.tolist() == [2, 1, 2, 2]


async def test_fewer_dimensions_are_of_length_one_again(connect: Open, app: ASGIApp) -> None:
    found = (await embed(connect, app, "abc", dimensions=2)).json()["data"][0]["embedding"]
    assert found == pytest.approx([3 / 10**0.5, 1 / 10**0.5])


def test_all_dimensions_are_left_as_they_are() -> None:
    vector = np.array([3, 4], np.float32)
    assert shorten(vector, 2) is vector
    assert shorten(vector, 1).tolist() == [1.0]
    assert shorten(vector, 1).dtype == np.float32


def test_zeros_stay_zeros() -> None:
    assert shorten(np.zeros(3, np.float32), 2).tolist() == [0, 0]


async def test_tokens_are_counted_if_the_model_has_that_output(serve: Serve, connect: Open) -> None:
    app = app_of(serve(EncoderInstance(), config=TELLING))
    found = (await embed(connect, app, ["one", "one two three"])).json()
    assert found["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


async def test_a_list_longer_than_the_window_is_answered_whole(serve: Serve, connect: Open) -> None:
    model = serve(EncoderInstance(), config=replace(ENCODER, parameters={"max_in_flight": "3"}))
    count = 2 * AT_ONCE + 1
    texts = ["x" * (1 + index % 7) for index in range(count)]
    found = (await embed(connect, app_of(model, settings=LARGE), texts)).json()["data"]
    assert [each["embedding"][0] for each in found] == [len(text) for text in texts]
    assert [each["index"] for each in found] == list(range(count))
    assert model.statistics.success.count == count


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"given": ""}, "input"),
        ({"given": []}, "input"),
        ({"given": [1, 2]}, "input"),
        ({"given": "a", "dimensions": 5}, "dimensions"),
        ({"given": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
async def test_the_invalid_member_is_named(
    connect: Open, app: ASGIApp, members: dict[str, Any], param: str
) -> None:
    found = await embed(connect, app, **members)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param)


async def test_one_text_that_is_refused_refuses_all_and_says_which(
    serve: Serve, connect: Open
) -> None:
    model = serve(EncoderInstance(), config=ENCODER)
    found = await embed(connect, app_of(model), ["a", "bad one", "c"])
    assert found.status_code == 400
    message = "text 1 of `input`: 'bad one' is too long"
    assert found.json()["error"]["message"] == message
    assert len(model.requests) == 0


async def test_a_model_with_the_contract_reads_the_body_itself(serve: Serve) -> None:
    instance = ScriptedInstance(None)
    asked = body(model="chat", input=[1, 2], dimensions="?")
    async with Exchange(app_of(serve(instance, config=CHAT)), PATH, asked):
        (request,) = (await instance.begun()).requests
        assert request.inputs[0].elements() == (asked,)


async def test_a_disconnect_cancels_every_text(serve: Serve) -> None:
    instance = ScriptedInstance(None)
    model = serve(instance, config=ENCODER)
    asked = body(model="encoder", input=["a", "b", "c"])
    async with Exchange(app_of(model), PATH, asked) as exchange:
        executions = [await instance.begun() for _ in range(3)]
        exchange.leave()
        for execution in executions:
            await soon(execution.stopped.wait())
        await exchange.ended()
    assert len(model.requests) == 0
    assert model.statistics.fail.count == 3


async def test_an_answer_without_a_vector_is_an_error(serve: Serve) -> None:
    instance = ScriptedInstance(None)
    asked = body(model="encoder", input="a")
    async with Exchange(app_of(serve(instance, config=ENCODER)), PATH, asked) as exchange:
        execution = await instance.begun()
        short = array_tensor("embedding", Datatype.FP32, np.zeros(3, np.float32))
        execution.answer(InferResponse(outputs=(short,), final=True))
        execution.end()
        assert (await exchange.start())[0] == 500
        assert b"did not answer with 4 finite numbers" in await exchange.rest()


async def test_each_text_is_a_request_of_the_tenant_and_a_list_is_refused_as_a_whole(
    serve: Serve, connect: Open
) -> None:
    instance = EncoderInstance()
    dataplane = DataPlane(LoadedModels(serve(instance, config=ENCODER)))  # type: ignore[arg-type]
    rules = TenantRules(requests_per_minute=3.0)
    dataplane.admission = Admission(Tenants({"": rules}), lambda: 1000.0)
    app = build_app(dataplane, SETTINGS, "triton")
    refused = await embed(connect, app, ["a", "b", "c", "d"])
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert instance.texts == []
    found = await embed(connect, app, ["a", "b"])
    assert found.status_code == 200
    assert found.headers["x-ratelimit-remaining-requests"] == "1"
    late = await embed(connect, app, ["a", "b"])
    assert (late.status_code, late.headers["x-should-retry"]) == (429, "true")
    assert instance.texts == ["a", "b"]


async def test_a_list_takes_its_requests_once_however_often_a_text_is_refused(
    serve: Serve, connect: Open
) -> None:
    """At two requests in flight, texts are refused and sent again."""
    instance = EncoderInstance()
    dataplane = DataPlane(LoadedModels(serve(instance, config=ENCODER)))  # type: ignore[arg-type]
    rules = TenantRules(requests_per_minute=8.0, max_in_flight=2)
    dataplane.admission = Admission(Tenants({"": rules}), lambda: 1000.0)
    found = await embed(connect, build_app(dataplane, SETTINGS, "triton"), ["a"] * 8)
    assert (found.status_code, len(instance.texts)) == (200, 8)
    assert found.headers["x-ratelimit-remaining-requests"] == "0"
