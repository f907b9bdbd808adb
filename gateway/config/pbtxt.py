"""Text and JSON forms of a configuration: parsing and formatting."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format
from google.protobuf.message import Message

from gateway.config import ModelConfig
from gateway.config.schema import Cardinality, FieldShape, shapes
from gateway.errors import Code, InferenceError
from gateway.protos import model_config_pb2

PACKAGE = "inference"
POOL = model_config_pb2.DESCRIPTOR.pool
LONGEST_FINDING = 200

NO_FIELD = re.compile(rf'Message type "{PACKAGE}\.([\w.]+)" has no field named "([^"]*)"')
NO_VALUE = re.compile(rf'Enum type "{PACKAGE}\.([\w.]+)" has no value named (\w+)')

WORDINGS = (
    (r'Field "(\w+)" is specified along with field "(\w+)"', "at most one of '{1}' and '{2}'"),
    (r'not have multiple "(\w+)" fields', "'{1}' only once"),
    (r"Couldn't parse integer", "an integer"),
    (r"Couldn't parse float", "a number"),
    (r"Value out of range", "an integer in the range of the field"),
    (r"Expected string", "a string in quotes"),
    (r"Expected identifier", "the name of a field"),
    (r"codec can't", "text in UTF-8"),
    (r"missing ending quote", "a closing quote on the same line"),
    (r"Expected (.+)\.$", "{1}"),
)
"""Patterns of protobuf's messages, and the text expected in each case."""


@dataclass(frozen=True, slots=True)
class SyntaxMistake:
    """The first mistake in a text, with its line and column from 1.

    `unknown_field` is the name of a field that does not exist, if that is the mistake.
    """

    line: int
    column: int
    what: str
    unknown_field: str = ""


def parse(text: str, source: str) -> ModelConfig:
    """Parse the text of a configuration.

    `source` names the file in errors, relative to the repository. Raises INVALID_ARG with the line,
    the text found and the text expected.
    """
    read = _read(text)
    if isinstance(read, SyntaxMistake):
        raise InferenceError(
            Code.INVALID_ARG, f"{source}, line {read.line}, column {read.column}: {read.what}"
        )
    try:
        return from_message(read)
    except InferenceError as error:
        raise InferenceError(error.code, f"{source}: {error.message}") from error


def parse_json(text: str) -> ModelConfig:
    """Parse the JSON form of a configuration, as in a load request.

    Names of enum values may be in any case. Raises INVALID_ARG with the parser's message.
    """
    message = model_config_pb2.ModelConfig()
    try:
        members = json.loads(text)
        if not isinstance(members, dict):
            raise ValueError(f"found {text[:LONGEST_FINDING]}, expected a JSON object")
        json_format.ParseDict(_with_enum_names(members, message.DESCRIPTOR), message)
    except (ValueError, RecursionError, SystemError, json_format.ParseError) as error:
        raise InferenceError(
            Code.INVALID_ARG, f"Invalid config override: {_complaint(error)}"
        ) from None
    return from_message(message)


def _complaint(error: Exception) -> str:
    """The first line of a parser's error."""
    reported = error.__cause__ if isinstance(error, SystemError) else error
    return str(reported).split("\n")[0]


def find_mistake(text: str) -> SyntaxMistake | None:
    """The first mistake in the text, or None."""
    read = _read(text)
    return read if isinstance(read, SyntaxMistake) else None


def from_message(message: model_config_pb2.ModelConfig) -> ModelConfig:
    """The configuration in a message; INVALID_ARG if an enum has a number without a name."""
    config: ModelConfig = _from(ModelConfig, message)
    return config


def to_message(config: ModelConfig) -> model_config_pb2.ModelConfig:
    """The message of a configuration."""
    message = model_config_pb2.ModelConfig()
    _fill(message, config)
    return message


def to_text(config: ModelConfig) -> str:
    """The text form, without defaults."""
    return text_format.MessageToString(to_message(config), as_utf8=True)


def to_json(config: ModelConfig) -> dict[str, Any]:
    """The members of the JSON form, in order (model configuration extension).

    Every field of a present message has a member; a message that is not present has none.
    """
    return _members(config)


# Text to message.


def _read(text: str) -> model_config_pb2.ModelConfig | SyntaxMistake:
    message = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        return _mistake(error, text)
    except (ValueError, SystemError) as error:  # from enum values that the parser does not check
        return _enum_mistake(error, text)
    return message


def _mistake(error: text_format.ParseError, text: str) -> SyntaxMistake:
    line, column = error.GetLine() or 1, error.GetColumn() or 1
    complaint = str(error)
    if match := NO_FIELD.search(complaint):
        return SyntaxMistake(line, column, _unknown_field(match[1], match[2]), match[2])
    if match := NO_VALUE.search(complaint):
        return SyntaxMistake(line, column, _unknown_value(match[1], match[2]))
    found, expected = _found(text, line, column), _expected(complaint)
    return SyntaxMistake(line, column, f"found {found}, expected {expected}")


def _enum_mistake(error: Exception, text: str) -> SyntaxMistake:
    """For a number beyond 32 bits or bytes that are not UTF-8 in place of an enum value.

    The parser's error has the text found, without its position.
    """
    cause = error.__cause__
    found = cause.object if isinstance(cause, UnicodeEncodeError) else str(error).split()[-1]
    before = text[: max(0, text.find(found))]
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    return SyntaxMistake(
        line, column, f"found {_found(text, line, column)}, expected a value's name"
    )


def _unknown_field(message: str, name: str) -> str:
    import difflib  # 0.2 MiB, for this error only

    known = POOL.FindMessageTypeByName(f"{PACKAGE}.{message}").fields_by_name
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", such as '{close[0]}'" if close else ""
    return f"found unknown field '{name}', expected a field of {message}{hint}"


def _unknown_value(enum: str, name: str) -> str:
    known = POOL.FindEnumTypeByName(f"{PACKAGE}.{enum}").values_by_name
    return f"found {name}, expected one of {', '.join(known)}"


def _found(text: str, line: int, column: int) -> str:
    lines = text.split("\n")
    rest = lines[line - 1][column - 1 :].split() if line <= len(lines) else []
    if not rest:
        return "the end of the line"
    found = rest[0][:LONGEST_FINDING]
    return found if found.isprintable() else ascii(found)


def _expected(complaint: str) -> str:
    for pattern, wording in WORDINGS:
        if match := re.search(pattern, complaint):
            return wording.format(match[0], *match.groups())
    return "text that the format of protobuf allows"


# JSON to message.


def _with_enum_names(value: Any, message: Any) -> Any:
    """The JSON value of a message, with the names of enum values in capitals."""
    if not isinstance(value, dict):
        return value
    known = {**message.fields_by_camelcase_name, **message.fields_by_name}
    return {key: _field_with_names(each, known.get(key)) for key, each in value.items()}


def _field_with_names(value: Any, field: Any) -> Any:
    if isinstance(value, list):
        return [_field_with_names(each, field) for each in value]
    if field is None:
        return value
    if field.enum_type is not None:
        return value.upper() if isinstance(value, str) else value
    if field.message_type is None:
        return value
    if field.message_type.GetOptions().map_entry and isinstance(value, dict):
        inner = field.message_type.fields_by_name["value"]
        return {key: _field_with_names(each, inner) for key, each in value.items()}
    return _with_enum_names(value, field.message_type)


# Message to dataclasses and back. Both sides have the same fields, which a test compares.


def _from(owner: Any, message: Message) -> Any:
    return owner(**{each.attribute: _field_from(each, message) for each in shapes(owner)})


def _field_from(shape: FieldShape, message: Message) -> Any:
    if shape.cardinality is Cardinality.OPTIONAL and not message.HasField(shape.name):
        return None
    value = getattr(message, shape.name)
    match shape.cardinality:
        case Cardinality.MANY:
            return tuple(_value_from(shape, each, message) for each in value)
        case Cardinality.MAPPED:
            return {key: _value_from(shape, value[key], message) for key in sorted(value)}
        case _:
            return _value_from(shape, value, message)


def _value_from(shape: FieldShape, value: Any, message: Message) -> Any:
    if shape.wrapped:
        return getattr(value, shape.wrapped)
    if shape.nested:
        return _from(shape.value, value)
    if issubclass(shape.value, StrEnum):
        return _named(shape, value, message)
    if shape.value is float and _single_precision(shape, message):
        return float(str(np.float32(value)))
    return value


def _named(shape: FieldShape, number: int, message: Message) -> StrEnum:
    enum_type: Any = message.DESCRIPTOR.fields_by_name[shape.name].enum_type
    if value := enum_type.values_by_number.get(number):
        name: StrEnum = shape.value(value.name)
        return name
    raise InferenceError(
        Code.INVALID_ARG,
        f"found {shape.name} {number}, expected one of {', '.join(enum_type.values_by_name)}",
    )


def _single_precision(shape: FieldShape, message: Message) -> bool:
    """Whether the field is a float: it reads as the nearest short decimal."""
    field = message.DESCRIPTOR.fields_by_name[shape.name]
    return field.type == field.TYPE_FLOAT


def _fill(message: Any, config: Any) -> None:
    message.SetInParent()
    for shape in shapes(config.__class__):
        value = getattr(config, shape.attribute)
        match shape.cardinality:
            case Cardinality.MANY:
                _fill_many(getattr(message, shape.name), value, shape)
            case Cardinality.MAPPED:
                _fill_mapped(getattr(message, shape.name), value, shape)
            case _:
                _fill_one(message, value, shape)


def _fill_one(message: Any, value: Any, shape: FieldShape) -> None:
    if value is None:
        return
    if shape.nested:
        _fill(getattr(message, shape.name), value)
    else:
        setattr(message, shape.name, value)


def _fill_many(target: Any, values: tuple[Any, ...], shape: FieldShape) -> None:
    for value in values:
        if shape.nested:
            _fill(target.add(), value)
        else:
            target.append(value)


def _fill_mapped(target: Any, values: Mapping[Any, Any], shape: FieldShape) -> None:
    for key, value in values.items():
        if shape.nested:
            _fill(target[key], value)
        elif shape.wrapped:
            setattr(target[key], shape.wrapped, value)
        else:
            target[key] = value


# Dataclasses to JSON.


def _members(config: Any) -> dict[str, Any]:
    return {
        each.name: _json(each, value)
        for each in shapes(config.__class__)
        if (value := getattr(config, each.attribute)) is not None
    }


def _json(shape: FieldShape, value: Any) -> Any:
    match shape.cardinality:
        case Cardinality.MANY:
            return [_json_value(shape, each) for each in value]
        case Cardinality.MAPPED:
            return {str(key): _json_value(shape, each) for key, each in value.items()}
        case _:
            return _json_value(shape, value)


def _json_value(shape: FieldShape, value: Any) -> Any:
    if shape.nested:
        return _members(value)
    if shape.wrapped:
        return {shape.wrapped: value}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return _json_name(value)
    return value


def _json_name(value: float) -> str:
    """JSON has no such numbers; protobuf writes them as strings."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
