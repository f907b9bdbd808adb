"""ModelConfig has the fields of its message."""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gateway.config import (
    WRAPPED,
    ModelConfig,
    ModelInput,
    ModelOutput,
    TransactionPolicy,
)
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.protos import model_config_pb2
from gateway.tensor import Datatype

SCALARS: dict[int, type] = {
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_STRING: str,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
}


def value_type(hint: Any) -> Any:
    """The type of one value of an annotation."""
    if typing.get_origin(hint) in (types.UnionType, tuple):
        return typing.get_args(hint)[0]
    return typing.get_args(hint)[1] if typing.get_origin(hint) is Mapping else hint


def pairs(owner: Any, descriptor: Descriptor) -> Iterator[tuple[Any, Descriptor]]:
    """Every dataclass with the message it mirrors, from the top down."""
    yield owner, descriptor
    hints = typing.get_type_hints(owner)
    for declared in dataclasses.fields(owner):
        below = value_type(hints[declared.name])
        field = descriptor.fields_by_name.get(declared.name.rstrip("_"))
        if field is not None and dataclasses.is_dataclass(below):
            yield from pairs(below, value_of(field).message_type)


def value_of(field: FieldDescriptor) -> FieldDescriptor:
    """The field that describes one value: of a map, that of its entries."""
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    return field.message_type.fields_by_name["value"] if is_map else field


def annotation(field: FieldDescriptor, value: Any) -> Any:
    """The annotation of a field with values of this type."""
    if value_of(field) is not field:
        key = field.message_type.fields_by_name["key"]
        return Mapping[SCALARS[key.cpp_type], value]  # type: ignore[misc]
    if field.is_repeated:
        return tuple[value, ...]
    return value | None if field.has_presence else value


PAIRS = {
    descriptor.full_name: (owner, descriptor)
    for owner, descriptor in pairs(ModelConfig, model_config_pb2.ModelConfig.DESCRIPTOR)
}


def messages(descriptors: Any) -> Iterator[str]:
    for descriptor in descriptors:
        if not descriptor.GetOptions().map_entry:
            yield descriptor.full_name
            yield from messages(descriptor.nested_types)


def test_every_message_has_a_dataclass() -> None:
    declared = set(messages(model_config_pb2.DESCRIPTOR.message_types_by_name.values()))
    assert set(PAIRS) == declared - {"inference.ModelParameter"}


@pytest.mark.parametrize(("owner", "descriptor"), PAIRS.values(), ids=PAIRS)
def test_a_dataclass_has_the_fields_of_its_message_in_its_order(
    owner: Any, descriptor: Descriptor
) -> None:
    assert [each.name.rstrip("_") for each in dataclasses.fields(owner)] == [
        field.name for field in descriptor.fields
    ]


@pytest.mark.parametrize(("owner", "descriptor"), PAIRS.values(), ids=PAIRS)
def test_a_field_is_annotated_as_its_message_declares_it(
    owner: Any, descriptor: Descriptor
) -> None:
    hints = typing.get_type_hints(owner)
    for declared, field in zip(dataclasses.fields(owner), descriptor.fields, strict=True):
        hint = hints[declared.name]
        value = value_type(hint)
        assert hint == annotation(field, value), field.full_name
        described = value_of(field)
        if described.enum_type is not None:
            assert issubclass(value, StrEnum)
            assert [*value] == [each.name for each in described.enum_type.values], field.full_name
        elif WRAPPED in declared.metadata:
            assert [each.name for each in described.message_type.fields] == [
                declared.metadata[WRAPPED]
            ]
        elif described.message_type is None:
            assert value is SCALARS[described.cpp_type], field.full_name


@pytest.mark.parametrize("owner", [owner for owner, _ in PAIRS.values()], ids=PAIRS)
def test_a_part_of_a_config_cannot_be_changed(owner: Any) -> None:
    part = owner()
    assert not hasattr(part, "__dict__")
    for declared in dataclasses.fields(owner):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, declared.name, None)


@pytest.mark.parametrize("member", [each for each in DataType if each != "TYPE_INVALID"])
def test_a_data_type_and_its_datatype_lead_to_each_other(member: DataType) -> None:
    assert DataType.of(member.datatype) is member


def test_every_datatype_has_a_data_type() -> None:
    assert {DataType.of(each).datatype for each in Datatype} == set(Datatype)


def test_strings_are_bytes_on_the_wire() -> None:
    assert DataType.TYPE_STRING.datatype is Datatype.BYTES
    assert ModelInput(data_type=DataType.TYPE_STRING).datatype is Datatype.BYTES
    assert ModelOutput(data_type=DataType.TYPE_FP32).datatype is Datatype.FP32


def test_a_tensor_without_data_type_has_no_datatype() -> None:
    with pytest.raises(InferenceError) as caught:
        _ = ModelInput(name="x").datatype
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("policy", "decoupled"),
    [
        (None, False),
        (TransactionPolicy(), False),
        (TransactionPolicy(decoupled=True), True),
    ],
)
def test_a_model_is_decoupled_by_its_transaction_policy(
    policy: TransactionPolicy | None, decoupled: bool
) -> None:
    assert ModelConfig(model_transaction_policy=policy).decoupled is decoupled


@pytest.mark.parametrize(
    ("max_batch_size", "batching", "shape"), [(0, False, (2, -1)), (1, True, (-1, 2, -1))]
)
def test_a_batching_model_has_a_batch_dimension_on_the_wire(
    max_batch_size: int, batching: bool, shape: tuple[int, ...]
) -> None:
    config = ModelConfig(max_batch_size=max_batch_size)
    assert config.batching is batching
    assert config.wire_shape(ModelInput(dims=(2, -1))) == shape
    assert config.wire_shape(ModelOutput(dims=(2, -1))) == shape


def test_a_parameter_that_is_not_set_has_the_default_asked_for() -> None:
    config = ModelConfig(parameters={"given": "value", "blank": ""})
    assert config.parameter("given", "other") == "value"
    assert config.parameter("blank", "other") == ""
    assert config.parameter("absent", "other") == "other"
    assert config.parameter("absent") == ""
