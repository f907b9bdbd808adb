"""Parameters, outputs and raw data of infer requests."""

from typing import Any

import pytest

from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.frontends.http.infer_request import InferDecoder, OutputForms, Target
from gateway.messages import (
    MOST_OUTPUTS,
    InferRequest,
    RequestedOutput,
    SequenceTag,
    SharedRegion,
)
from tests.gateway.frontends.http.infer_requests import (
    LIMIT,
    MODEL,
    UNSIGNED,
    Regions,
    decode,
    given,
    refusal,
    request_of,
)


def forms_of(**members: Any) -> OutputForms:
    return decode({"inputs": [given(1.0)], **members})[1]


# Parameters.


def test_parameters_of_four_kinds_reach_the_model() -> None:
    found = {"a": 1, "b": 2.5, "c": True, "d": "x", "e": 2**63, "f": -(2**63), "headers": "h"}
    parameters = request_of(parameters=found).parameters
    assert parameters == {**found, "e": 2.0**63}
    kinds = [type(value) for value in parameters.values()]
    assert kinds == [int, float, bool, str, float, int, str]


def test_some_parameters_are_the_protocols_own() -> None:
    request = request_of(
        parameters={
            "sequence_id": 7,
            "sequence_start": True,
            "sequence_end": False,
            "priority": 2,
            "timeout": 50,
            "binary_data_output": True,
        }
    )
    assert request.sequence == SequenceTag(7, start=True, end=False)
    assert (request.priority, request.timeout_us) == (2, 50)
    assert request.parameters == {}


@pytest.mark.parametrize("nothing", [0, ""])
def test_a_sequence_has_an_id(nothing: int | str) -> None:
    request = request_of(parameters={"sequence_id": nothing, "sequence_start": True})
    assert request.sequence is None


def test_the_id_of_a_sequence_may_be_text() -> None:
    assert request_of(parameters={"sequence_id": "x" * 128}).sequence == SequenceTag("x" * 128)
    assert refusal({"inputs": [], "parameters": {"sequence_id": "x" * 129}}) == (
        Code.UNSUPPORTED,
        "string correlation ID cannot be longer than 128 characters",
    )


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("sequence_id", 1.5, "string as string"),
        ("sequence_id", -1, "string as string"),
        ("sequence_id", True, "string as string"),
        ("sequence_start", 1, "boolean as boolean"),
        ("sequence_end", "true", "boolean as boolean"),
        ("priority", -1, "unsigned-integer as unsigned-integer"),
        ("priority", "1", "unsigned-integer as unsigned-integer"),
        ("timeout", 1.0, "unsigned-integer as unsigned-integer"),
        ("timeout", None, "unsigned-integer as unsigned-integer"),
        ("binary_data_output", 1, "boolean as boolean"),
    ],
)
def test_a_known_parameter_has_its_kind(key: str, value: Any, kind: str) -> None:
    assert refusal({"inputs": [], "parameters": {key: value}}) == (
        Code.INTERNAL,
        f"Unable to parse '{key}': attempt to access JSON non-{kind}",
    )


@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_other_kinds_are_no_parameters(value: Any) -> None:
    assert refusal({"inputs": [], "parameters": {"k": value}}) == (
        Code.INVALID_ARG,
        "parameter 'k' has invalid type. It should be either 'int', 'bool', or 'string'.",
    )


def test_some_keys_are_reserved() -> None:
    assert refusal({"inputs": [], "parameters": {"triton_x": 1}}) == (
        Code.INVALID_ARG,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be "
        "specified.",
    )


def test_forwarded_headers_become_parameters() -> None:
    target = Target(MODEL, headers=[("X-Tenant", "a"), ("k", "header")])
    body = b'{"inputs":[],"parameters":{"k":"own"}}'
    request, _ = InferDecoder(Regions(), LIMIT).decode(target, body, memoryview(b""))
    assert request.parameters == {"X-Tenant": "a", "k": "header"}


@pytest.mark.parametrize("name", ["timeout", "headers", "binary_data_output", "triton_x"])
def test_a_header_cannot_pass_for_a_parameter_of_the_protocol(name: str) -> None:
    target = Target(MODEL, headers=[(name, "1")])
    with pytest.raises(InferenceError) as caught:
        InferDecoder(Regions(), LIMIT).decode(target, b'{"inputs":[]}', memoryview(b""))
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"Header '{name}' is reserved for Triton usage and cannot be forwarded.",
    )


@pytest.mark.parametrize("name", ["Timeout", "TRITON_x", "cancel", "sequence_x", "Sluice-Stream"])
def test_other_names_with_a_meaning_for_the_server_are_dropped(name: str) -> None:
    target = Target(MODEL, headers=[(name, "1"), ("k", "2")])
    request, _ = InferDecoder(Regions(), LIMIT).decode(target, b'{"inputs":[]}', memoryview(b""))
    assert request.parameters == {"k": "2"}


# Outputs.


def output(name: str = "Y", **parameters: Any) -> dict[str, Any]:
    """One entry of `outputs`."""
    return {"name": name, "parameters": parameters} if parameters else {"name": name}


@pytest.mark.parametrize(
    ("members", "form"),
    [
        ({}, False),
        ({"outputs": []}, False),
        ({"parameters": {"binary_data_output": True}}, True),
        ({"parameters": {"binary_data_output": False}}, False),
        ({"outputs": [output()], "parameters": {"binary_data_output": True}}, False),
        ({"outputs": [output(binary_data=True)]}, True),
        (
            {"outputs": [output(binary_data=False)], "parameters": {"binary_data_output": True}},
            False,
        ),
        ({"outputs": [output(classification=2, binary_data=True)]}, True),
    ],
)
def test_the_request_says_which_outputs_are_binary(members: dict[str, Any], form: bool) -> None:
    forms = forms_of(**members)
    assert forms.is_binary("Y") is form
    assert forms.wants("Y")
    assert forms.wants("Z") is not bool(members.get("outputs"))


def test_outputs_are_asked_for_by_name() -> None:
    request = request_of(outputs=[output("A"), output("B", classification=3), output("C", x=1)])
    assert request.outputs == (RequestedOutput("A"), RequestedOutput("B", 3), RequestedOutput("C"))


def test_an_output_may_go_to_shared_memory() -> None:
    where = output(shared_memory_region="r", shared_memory_byte_size=8, shared_memory_offset=4)
    found = {"inputs": [given(1.0)], "outputs": [where]}
    request, _ = decode(found, regions=Regions(r=b""))
    assert request.outputs == (RequestedOutput("Y", region=SharedRegion("r", 8, 4)),)
    assert refusal(found) == (Code.NOT_FOUND, "Unable to find shared memory region: 'r'")


@pytest.mark.parametrize(
    ("found", "code", "message"),
    [
        (
            5,
            Code.INTERNAL,
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
        ),
        (
            {"name": 5},
            Code.INTERNAL,
            "Unable to parse 'name': attempt to access JSON non-string as string",
        ),
        (output(classification="1"), Code.INTERNAL, f"Unable to set 'classification': {UNSIGNED}"),
        (output(classification=-1), Code.INTERNAL, f"Unable to set 'classification': {UNSIGNED}"),
        (output(classification=True), Code.INTERNAL, f"Unable to set 'classification': {UNSIGNED}"),
        (
            output(binary_data="yes"),
            Code.INTERNAL,
            "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean",
        ),
        (
            output(shared_memory_region="r", classification=1),
            Code.INVALID_ARG,
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            output(shared_memory_region="r", binary_data=True),
            Code.INVALID_ARG,
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
        (
            output(shared_memory_region="r", shared_memory_byte_size=-1),
            Code.INTERNAL,
            f"Unable to parse 'shared_memory_byte_size': {UNSIGNED}",
        ),
        (
            output(shared_memory_region=5),
            Code.INTERNAL,
            "Unable to parse 'shared_memory_region': attempt to access JSON non-string as string",
        ),
    ],
)
def test_a_wrong_output_is_refused(found: Any, code: Code, message: str) -> None:
    assert refusal({"inputs": [given(1.0)], "outputs": [found]}) == (code, message)


def test_a_request_lists_a_limited_number_of_outputs() -> None:
    listed = [{"name": "Y"}] * MOST_OUTPUTS
    assert request_of(outputs=listed).outputs == (RequestedOutput("Y"),)
    assert refusal({"inputs": [given(1.0)], "outputs": [*listed, {"name": "Y"}]}) == (
        Code.INVALID_ARG,
        "the request lists 1025 outputs, expected at most 1024; list each output once, or none "
        "for all outputs",
    )


# Raw requests.


def raw(config: ModelConfig, body: bytes) -> InferRequest:
    request, forms = InferDecoder(Regions(), LIMIT).decode_raw(Target(config), memoryview(body))
    assert forms.is_binary("Y")
    assert forms.wants("Y")
    return request


def taking(datatype: str, *dims: int, max_batch_size: int = 0) -> ModelConfig:
    """A model with one input."""
    tensor = ModelInput(name="X", data_type=DataType(f"TYPE_{datatype}"), dims=dims)
    return ModelConfig(name="m", max_batch_size=max_batch_size, input=(tensor,))


@pytest.mark.parametrize(
    ("dims", "batch", "shape"),
    [
        ((-1,), 0, (4,)),
        ((4,), 0, (4,)),
        ((-1, 2), 0, (2, 2)),
        ((2, -1), 8, (1, 2, 2)),
        ((4,), 8, (1, 4)),
        ((2,), 0, (2,)),
        ((3, -1), 0, (3, 1)),
        ((0, -1), 0, (0, 0)),
    ],
)
def test_the_shape_of_raw_data_follows_from_its_size(
    dims: tuple[int, ...], batch: int, shape: tuple[int, ...]
) -> None:
    request = raw(taking("INT32", *dims, max_batch_size=batch), bytes(16))
    assert [(each.name, each.shape, len(each.raw())) for each in request.inputs] == [
        ("X", shape, 16)
    ]


@pytest.mark.parametrize(("batch", "shape"), [(0, (1,)), (4, (1, 1))])
def test_raw_text_is_one_element(batch: int, shape: tuple[int, ...]) -> None:
    (tensor,) = raw(taking("STRING", 1, max_batch_size=batch), b"hello").inputs
    assert (tensor.shape, tensor.elements()) == (shape, (b"hello",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MODEL,
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' "
            "model configuration",
        ),
        (
            taking("FP32", -1, -1),
            "The shape of the raw input 'X' can not be deduced because there are more than one "
            "variable-sized dimension",
        ),
        (
            taking("STRING", -1),
            "For BYTE datatype raw input 'X', the model must have input shape [1]",
        ),
    ],
)
def test_raw_data_must_determine_its_shape(config: ModelConfig, message: str) -> None:
    with pytest.raises(InferenceError) as caught:
        raw(config, bytes(16))
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"[request id: <id_unknown>] {message}",
    )
