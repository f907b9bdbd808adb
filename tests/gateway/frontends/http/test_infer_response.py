"""The infer response: the message to JSON and binary data (protocol: response object)."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.http.infer_request import OutputForms, read_outputs
from gateway.frontends.http.infer_response import EncodedResponse, InferEncoder
from gateway.messages import InferResponse, RequestedOutput, SharedRegion
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor

FLOATS = array_tensor("Y", Datatype.FP32, np.array([[0.1, 1.0]], np.float32))
COUNTS = array_tensor("N", Datatype.INT64, np.array([2**62], np.int64))


class Memory(SharedMemory):
    """Shared memory that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, bytes] = {}

    def write(self, region: SharedRegion, output: Tensor) -> None:
        self.written[f"{region.name}/{output.name}"] = bytes(output.raw())


class Config:
    batching = True


class Labelled:
    """The parts of a model that its responses state."""

    name = "m"
    version = "3"
    config = Config()
    labels: Mapping[str, Sequence[str]] = {"Y": ("no", "yes")}


def encode(
    *outputs: Tensor,
    forms: OutputForms = OutputForms(),  # noqa: B008 - frozen
    memory: SharedMemory | None = None,
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
) -> EncodedResponse:
    response = InferResponse(outputs=outputs, parameters=parameters or {}, final=True)
    encoder = InferEncoder(memory or SharedMemory())
    return encoder.encode(Labelled(), request_id, response, forms)  # type: ignore[arg-type]


def asking(*outputs: RequestedOutput, binary: Sequence[str] = ()) -> OutputForms:
    """A request that lists its outputs."""
    listed = {each.name: each for each in outputs}
    return OutputForms(listed=listed, binary={name: name in binary for name in listed})


def test_a_response_is_compact_json_in_the_order_of_the_protocol() -> None:
    found = encode(FLOATS, COUNTS, request_id="é", parameters={"a": 1, "b": "x", "c": True})
    assert found.header.decode() == (
        '{"id":"é","model_name":"m","model_version":"3","parameters":{"a":1,"b":"x","c":true},'
        '"outputs":[{"name":"Y","datatype":"FP32","shape":[1,2],"data":[0.10000000149011612,1.0]},'
        '{"name":"N","datatype":"INT64","shape":[1],"data":[4611686018427387904]}]}'
    )
    assert found.blobs == ()


def test_a_response_without_id_and_parameters_has_neither_member() -> None:
    assert encode().header == b'{"model_name":"m","model_version":"3","outputs":[]}'


def test_binary_outputs_follow_in_the_order_of_the_outputs_without_a_copy() -> None:
    forms = asking(*map(RequestedOutput, ("B", "N", "Y")), binary=("Y", "B"))
    texts = text_tensor("B", ["a"])
    found = encode(FLOATS, COUNTS, texts, forms=forms)
    outputs = json.loads(found.header)["outputs"]
    assert [each["name"] for each in outputs] == ["Y", "N", "B"]
    assert [each.get("parameters") for each in outputs] == [
        {"binary_data_size": 8},
        None,
        {"binary_data_size": 5},
    ]
    assert [("data" in each) for each in outputs] == [False, True, False]
    assert found.blobs == (FLOATS.data, b"\1\0\0\0a")
    assert found.blobs[0] is FLOATS.data


def test_only_requested_outputs_are_sent() -> None:
    found = encode(FLOATS, COUNTS, forms=asking(RequestedOutput("N")))
    assert [each["name"] for each in json.loads(found.header)["outputs"]] == ["N"]


@pytest.mark.parametrize(
    ("outputs", "has_binary"),
    [
        ([], False),
        ([Tensor("E", Datatype.FP32, (0,), b"")], False),
        ([Tensor("E", Datatype.FP32, (0,), b""), FLOATS], True),
    ],
)
def test_nothing_at_all_is_no_binary_data(outputs: list[Tensor], has_binary: bool) -> None:
    found = encode(*outputs, forms=OutputForms(default=True))
    assert found.has_binary is has_binary
    sizes = [e["parameters"]["binary_data_size"] for e in json.loads(found.header)["outputs"]]
    assert sizes == [len(each.raw()) for each in outputs]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_that_json_has_not_is_written_as_python_does(value: float) -> None:
    array = np.array([1.0, value])
    found = encode(array_tensor("é", Datatype.FP64, array), parameters={"p": value})
    assert b" " not in found.header
    assert "é".encode() in found.header
    read = json.loads(found.header)
    assert read["outputs"][0]["data"] == pytest.approx([1.0, value], nan_ok=True)
    assert read["parameters"]["p"] == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("datatype", [Datatype.FP16, Datatype.BF16])
def test_half_precision_is_sent_as_binary_only(datatype: Datatype) -> None:
    half = Tensor("Y", datatype, (1,), b"\0\x3c")
    assert encode(half, forms=OutputForms(default=True)).blobs == (b"\0\x3c",)
    with pytest.raises(InferenceError) as caught:
        encode(half)
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("binary", [(), ("Y",)])
def test_classes_are_bytes_in_either_form(binary: tuple[str, ...]) -> None:
    forms = asking(RequestedOutput("Y", classes=2), binary=binary)
    found = encode(FLOATS, forms=forms)
    (output,) = json.loads(found.header)["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [1, 2])
    texts = ["1.000000:1:yes", "0.100000:0:no"]
    if binary:
        assert found.blobs == (text_tensor("Y", texts).raw(),)
    else:
        assert output["data"] == texts


def test_an_output_in_shared_memory_is_only_described() -> None:
    memory = Memory()
    forms = asking(RequestedOutput("Y", region=SharedRegion("r", 8)), RequestedOutput("N"))
    found = encode(FLOATS, COUNTS, forms=forms, memory=memory)
    assert json.loads(found.header)["outputs"][0] == {
        "name": "Y",
        "datatype": "FP32",
        "shape": [1, 2],
    }
    assert memory.written == {"r/Y": bytes(FLOATS.raw())}


def test_the_json_of_a_binary_response_is_that_of_any_other() -> None:
    # The quick way is taken only if that is known beforehand: both are asked for each response.
    chance, memory = random.Random(5), SharedMemory()
    encoder = InferEncoder(memory)
    for _ in range(500):
        names = chance.sample(["Y", "N", 'with "quotes"', "é"], chance.randrange(4))
        shapes = [(chance.randrange(3), chance.randrange(1, 3)) for _ in names]
        outputs = [
            array_tensor(name, Datatype.FP32, np.full(shape, chance.random(), np.float32))
            for name, shape in zip(names, shapes, strict=True)
        ]
        if chance.random() < 0.3:
            outputs.append(text_tensor("T", ["a", "bc"]))
        parameters = {"p": 1} if chance.random() < 0.2 else {}
        response = InferResponse(outputs=tuple(outputs), parameters=parameters, final=True)
        asked = [RequestedOutput(name) for name in chance.sample([*names, "T"], 1)]
        forms = OutputForms(default=True) if chance.random() < 0.5 else asking(*asked, binary=names)
        forms = replace(forms, binary=dict.fromkeys(forms.binary, True))
        request_id = chance.choice(["", "i", 'q"é'])
        quick, full = (
            encoder.encode(Labelled(), request_id, response, replace(forms, only_binary=known))  # type: ignore[arg-type]
            for known in (True, False)
        )
        assert (quick.header, list(map(bytes, quick.blobs))) == (
            full.header,
            list(map(bytes, full.blobs)),
        )


@pytest.mark.parametrize(
    ("found", "only_binary"),
    [
        ({}, False),
        ({"outputs": []}, False),
        ({"outputs": [{"name": "Y", "parameters": {"binary_data": True}}]}, True),
        ({"outputs": [{"name": "Y"}]}, False),
        (
            {
                "outputs": [
                    {"name": "Y", "parameters": {"binary_data": True}},
                    {"name": "N", "parameters": {"binary_data": False}},
                ]
            },
            False,
        ),
        (
            {"outputs": [{"name": "Y", "parameters": {"binary_data": True, "classification": 1}}]},
            False,
        ),
    ],
)
def test_a_request_says_whether_its_response_is_all_binary(
    found: dict[str, Any], only_binary: bool
) -> None:
    _, forms = read_outputs(found, SharedMemory(), default=False)
    assert forms.only_binary is only_binary


def test_binary_by_default_is_all_binary_where_no_output_is_listed() -> None:
    listed = {"outputs": [{"name": "Y"}]}
    assert read_outputs({}, SharedMemory(), default=True)[1].only_binary
    assert not read_outputs(listed, SharedMemory(), default=True)[1].only_binary
