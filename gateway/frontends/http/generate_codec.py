"""Codec of the generate extension: JSON to messages and back; no I/O."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain, count, islice
from typing import Any

import orjson

from gateway.config import ModelConfig, ModelInput
from gateway.conversations.turn import converses
from gateway.errors import Code, InferenceError
from gateway.frontends.http.errors import error_body
from gateway.frontends.http.infer_request import read_parameters
from gateway.frontends.http.json_object import parse_generate
from gateway.frontends.http.json_tensors import (
    is_large,
    pack,
    values_of,
    written,
    written_string,
)
from gateway.frontends.http.large_json import LargeArray, plain
from gateway.messages import InferRequest, InferResponse, SequenceTag, request_prefix
from gateway.policy.caller import Caller
from gateway.tensor import Buffer, Datatype, Tensor

NESTED = "parameters"
"""The member whose own members are read as members of the request."""
STRUCTURED_INPUT = "sampling_parameters"
"""A model with this input has the generation contract: its parameters may be any JSON."""
MOST_DEPTH = 200
"""Levels of a parameter; encoders and decoders of JSON, here and in models, recurse."""
TAGS = ("sequence_id", "sequence_start", "sequence_end")
"""The place of a request in a conversation; ordinary parameters of other models, as on Triton."""

LAST_MEMBER = "model_version"
"""An output whose name sorts after this one can follow the constant members."""

SHORT = 4096
"""Bytes of a text that is written on the event loop."""

WINDOW_BYTES = 1 << 20
"""Bytes that are searched in one call, which holds the interpreter lock."""
BEFORE_VALUE = rb"(?=[ \t\r\n]*+:)"
"""Matches behind the name of a member, and behind no other string."""
MARK = "\u0001sluice\u0001"
"""A suffix that makes the name of a member unique."""


def decode_generate(
    members: Mapping[str, Any],
    config: ModelConfig,
    version: str = "",
    received_ns: int = 0,
    caller: Caller | None = None,
) -> InferRequest:
    """A generate request: inputs by name, all other members are parameters (generate extension).

    Raises InferenceError with Triton's texts.
    """
    reader = _GenerateReader(config, _request_id(members, config))
    reader.read(members)
    sequence = _take_tag(reader.parameters, config, caller)
    return InferRequest(
        model=config.name,
        version=version,
        id=reader.request_id,
        inputs=tuple(reader.inputs.values()),
        parameters=reader.parameters,
        sequence=sequence,
        received_ns=received_ns,
        caller=caller,
    )


def _take_tag(
    parameters: dict[str, Any], config: ModelConfig, caller: Caller | None
) -> SequenceTag | None:
    tags = {name: parameters[name] for name in TAGS if name in parameters}
    if not tags or not converses(config):
        return None
    for name in tags:
        del parameters[name]
    return read_parameters({"parameters": tags}).sequence(caller)


def _request_id(members: Mapping[str, Any], config: ModelConfig) -> str:
    found = plain(members.get("id", ""))
    if isinstance(found, str):
        return found
    if any(each.name == "id" for each in config.input):
        return ""
    raise InferenceError(
        Code.INTERNAL, "Unable to parse 'id': attempt to access JSON non-string as string"
    )


class _GenerateReader:
    """Collects the inputs and parameters of one generate request."""

    def __init__(self, config: ModelConfig, request_id: str) -> None:
        self._config = config
        self._known = {each.name: each for each in config.input}
        self._structured = STRUCTURED_INPUT in self._known
        self.request_id = request_id
        self.inputs: dict[str, Tensor] = {}
        self.parameters: dict[str, Any] = {}

    def read(self, members: Mapping[str, Any]) -> None:
        for key, value in members.items():
            if key == NESTED:
                self._read_nested(value)
            else:
                self._add(key, value)

    def _read_nested(self, nested: Any) -> None:
        if NESTED in self._known:
            raise InferenceError(
                Code.INVALID_ARG,
                "Keyword 'parameters' for nested schema also given as input tensor name",
            )
        if not isinstance(nested, dict):
            raise InferenceError(
                Code.INTERNAL,
                "Expected JSON object for keyword: 'parameters': attempt to access JSON "
                "non-object as object",
            )
        try:
            for key, value in nested.items():
                self._add(key, value)
        except InferenceError as error:
            prefix = "Converting keyword: 'parameters': "
            raise InferenceError(error.code, prefix + error.message) from None

    def _add(self, key: str, value: Any) -> None:
        if key in self._known:
            self._add_input(self._known[key], value)
        else:
            self._add_parameter(key, value)

    def _add_input(self, expected: ModelInput, value: Any) -> None:
        if expected.name in self.inputs:
            raise InferenceError(
                Code.INVALID_ARG,
                f"{request_prefix(self.request_id)}input '{expected.name}' already exists in "
                "request",
            )
        shape = self._config.wire_shape(expected)
        self.inputs[expected.name] = _tensor(expected, shape, value)

    def _add_parameter(self, key: str, value: Any) -> None:
        value = plain(value)
        if not self._structured and not isinstance(value, str | int | float | bool):
            raise InferenceError(
                Code.INVALID_ARG,
                f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or "
                "'string'.",
            )
        if _nests(value) and _is_deeper(MOST_DEPTH, value):
            raise InferenceError(
                Code.INVALID_ARG,
                f"parameter '{key}' is nested too deeply, expected at most {MOST_DEPTH} levels",
            )
        self.parameters[key] = value


def _is_deeper(most: int, value: Any) -> bool:
    """Whether lists and objects are nested in more levels than that; without recursion."""
    level = [value]
    for _ in range(most + 1):
        nested = [each.values() if type(each) is dict else each for each in level if _nests(each)]
        if not nested:
            return False
        level = [*chain.from_iterable(nested)]
    return True


def _nests(value: Any) -> bool:
    return type(value) is dict or type(value) is list


def _tensor(expected: ModelInput, shape: Sequence[int], value: Any) -> Tensor:
    if type(value) is LargeArray:
        if expected.datatype is not Datatype.BYTES:
            return _large_tensor(expected, shape, value)
        value = value.whole()
    if type(value) is dict:
        value = plain(value)
    if expected.datatype is Datatype.BYTES and _is_structure(value):
        value = _as_text(value, expected.name)
    values = value if isinstance(value, list) else [value]
    fitted = fit_shape(shape, len(values), expected.name)
    data = pack(expected.datatype, values, expected.name)
    return Tensor(expected.name, expected.datatype, fitted, data)


def _large_tensor(expected: ModelInput, shape: Sequence[int], value: LargeArray) -> Tensor:
    """Numbers, packed in parts."""
    packed, count = [], 0
    for part in value.parts():
        packed.append(pack(expected.datatype, part, expected.name))
        count += len(part)
    fitted = fit_shape(shape, count, expected.name)
    return Tensor(expected.name, expected.datatype, fitted, b"".join(packed))  # type: ignore[arg-type] # only BYTES are tuples


def _is_structure(value: Any) -> bool:
    """Whether a BYTES input takes the JSON as text: an object, or a list with objects or lists."""
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(each, dict | list) for each in value)
    )


def _as_text(structure: Any, name: str) -> str:
    try:
        return orjson.dumps(structure).decode()
    except orjson.JSONEncodeError:
        raise InferenceError(
            Code.INVALID_ARG, f"the JSON of input '{name}' is nested too deep to become text"
        ) from None


def fit_shape(shape: Sequence[int], count: int, name: str) -> tuple[int, ...]:
    """A shape for `count` elements: the innermost -1 takes the quotient by all fixed dims."""
    left = count
    fitted: list[int] = []
    taken = False
    for dim in shape:
        if dim > 0 and left % dim == 0:
            left //= dim
        elif dim > 0:
            raise _unfitting(name)
    for dim in reversed(shape):
        fitted.append(dim if dim >= 0 else (1 if taken else left))
        taken = taken or dim < 0
    if not taken and left != 1:
        raise _unfitting(name)
    return tuple(reversed(fitted))


def _unfitting(name: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"The schema can not convert input '{name}' to tensor with proper shape",
    )


class GenerateEncoder:
    """Encodes the responses of one generate request; constant members are encoded once."""

    def __init__(self, model: str, version: str, request_id: str) -> None:
        self._members = {"model_name": model, "model_version": version}
        if request_id:
            self._members["id"] = request_id
        self._prefix = orjson.dumps(self._members, option=orjson.OPT_SORT_KEYS)[:-1]
        self._prefixes: dict[str, bytes] = {}

    def encode(self, response: InferResponse) -> bytes:
        """One JSON object: parameters and outputs with sorted keys, or the error."""
        return self.encode_text(response) or self._encode_any(response)

    def encode_text(self, response: InferResponse) -> bytes | None:
        """The same for a response with one short text, such as a token; None for any other."""
        if len(response.outputs) == 1 and not response.parameters:
            output = response.outputs[0]
            data, is_last = output.data, output.name > LAST_MEMBER
            if is_last and isinstance(data, tuple) and len(data) == 1 and len(data[0]) <= SHORT:
                prefix = self._prefixes.get(output.name) or self._prefix_for(output.name)
                return prefix + orjson.dumps(data[0].decode("utf-8", "replace")) + b"}"
        return None

    def encode_element(self, name: str, element: bytes) -> bytes | None:
        """As `encode_text` of a response with this element; without further calls, as there."""
        if name <= LAST_MEMBER or len(element) > SHORT:
            return None
        prefix = self._prefixes.get(name) or self._prefix_for(name)
        return prefix + orjson.dumps(element.decode("utf-8", "replace")) + b"}"

    def _prefix_for(self, name: str) -> bytes:
        prefix = self._prefixes[name] = b"%b,%b:" % (self._prefix, orjson.dumps(name))
        return prefix

    def _encode_any(self, response: InferResponse) -> bytes:
        if response.error is not None:
            return error_body(response.error.message)
        members: dict[str, Any] = {**self._members}
        members.update((name, _number(value)) for name, value in response.parameters.items())
        members.update((output.name, _value(output)) for output in response.outputs)
        return orjson.dumps(members, option=orjson.OPT_SORT_KEYS)


def _value(output: Tensor) -> Any:
    if math.prod(output.shape) == 1:
        if output.datatype is Datatype.BYTES and is_large((output,)):
            return orjson.Fragment(written_string(next(iter(output.elements()))))
        return _number(values_of(output)[0])
    return written(output)


def _number(value: Any) -> Any:
    """An element or a parameter; NaN and infinities become Python's literals, as on Triton."""
    if type(value) is float and not math.isfinite(value):
        return orjson.Fragment(json.dumps(value))
    return value


def refuse_repeated_inputs(body: Buffer, members: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise INVALID_ARG with Triton's text if an input occurs twice in the body.

    `members` is the parsed body. It is parsed again only if the name of an input occurs twice.
    Names with needless escapes are not found.
    """
    text = body if isinstance(body, bytes | bytearray) else bytes(body)
    if not _has_more(text, b":", len(members)):
        return  # one colon per member: there is no other member
    for each in config.input:
        key = orjson.dumps(each.name)
        if _has_more(text, key, 1):
            member = re.compile(re.escape(key) + BEFORE_VALUE)
            if len(list(islice(member.finditer(text), 2))) > 1:
                _check(text, member, members, each.name)


def _has_more(text: bytes | bytearray, piece: bytes, most: int) -> bool:
    """Whether a piece occurs more often in a text; in windows, which let other threads run."""
    found, reach = 0, len(piece) - 1
    for at in range(0, len(text), WINDOW_BYTES):
        found += text.count(piece, at, at + WINDOW_BYTES + reach)
        if found > most:
            return True
    return False


def _check(
    body: bytes | bytearray, member: re.Pattern[bytes], members: Mapping[str, Any], name: str
) -> None:
    numbers, mark = count(1), orjson.dumps(name + MARK)[:-1]
    marked = parse_generate(member.sub(lambda _: b'%b%d"' % (mark, next(numbers)), body))
    nested = marked.get(NESTED)
    text = f"{request_prefix(_text(members.get('id')))}input '{name}' already exists in request"
    if _count(marked, name) > 1:
        raise InferenceError(Code.INVALID_ARG, text)
    if isinstance(nested, dict) and _count(nested, name) > 1:
        raise InferenceError(Code.INVALID_ARG, f"Converting keyword: '{NESTED}': {text}")


def _count(members: Mapping[str, Any], name: str) -> int:
    return sum(key.startswith(name + MARK) for key in members)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
