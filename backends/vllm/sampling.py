"""Sampling parameters of requests as arguments of vLLM's SamplingParams."""

import math
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import orjson

from backends.vllm.failures import first_mistake
from gateway.errors import Code, InferenceError

MAX_SEQUENCES = 64
MAX_STRINGS = 64
MAX_STRING_LENGTH = 1024
MAX_OBJECT_BYTES = 1 << 20
MAX_ELEMENTS = 1 << 18
"""More than the tokens of any vocabulary."""

INT64 = range(-(2**63), 2**63)

INTERNAL_FIELDS = frozenset({"output_kind", "skip_clone", "output_text_buffer_length"})
"""Fields of SamplingParams that only the engine sets, besides those with a `_`."""

IGNORED_IF_EMPTY = ("bad_words", "stop_words")
"""LiteLLM sends these with one empty string to every Triton server."""

Cast = Callable[[Any], Any]


class NotOfType(ValueError):
    """A value does not have the type of its field; the text names that type."""


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """The sampling parameters by name, each with the function that reads its value.

    `context` is the maximum number of tokens of a sequence, prompt included.
    """

    casts: Mapping[str, Cast]
    context: int

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters with the types of their fields.

        Raises InferenceError INVALID_ARG for an unknown name, a value of another type, and a
        number above the limit of one request.
        """
        read = {name: self._read(name, value) for name, value in _without_empty(given).items()}
        _check_size("n", read.get("n"), MAX_SEQUENCES)
        self._check_max_tokens(read.get("max_tokens"))
        for name in ("stop", "bad_words"):
            _check_strings(name, read.get(name))
        _check_transfers(read.get("extra_args"))
        return read

    def _read(self, name: str, value: Any) -> Any:
        cast = self.casts.get(name)
        if cast is None:
            raise _invalid(self._unknown(name))
        try:
            return cast(value)
        except NotOfType as error:
            raise _invalid(
                f"sampling parameter '{name}' is {_show(value)}, expected {error}"
            ) from None
        except (OverflowError, orjson.JSONEncodeError):
            raise _invalid(
                f"sampling parameter '{name}' is {_show(value)}, which is too large or nested too "
                "deep"
            ) from None

    def _unknown(self, name: str) -> str:
        near = get_close_matches(name, self.casts, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        return f"'{name}' is neither an input of the model nor a sampling parameter{hint}"

    def _check_max_tokens(self, value: int | None) -> None:
        # As vLLM's own server: more than the context is refused; generation ends at the context.
        if value is not None and value > self.context:
            raise _invalid(
                f"max_tokens={value} is more than the model's context of {self.context} tokens"
            )


def casts_of(annotations: Mapping[str, Any]) -> dict[str, Cast]:
    """The fields a client may set, from the annotations of SamplingParams."""
    return {
        name: cast_for(annotation)
        for name, annotation in annotations.items()
        if not name.startswith("_") and name not in INTERNAL_FIELDS
    }


def cast_for(annotation: Any) -> Cast:
    """The function that reads a value of this type, from JSON or from text."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin is list:
        return _list_of(cast_for(arguments[0]))
    if origin is dict:
        return _dict_of(cast_for(arguments[0]), cast_for(arguments[1]))
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _built_by(annotation)
    return PLAIN.get(annotation, _as_it_is)


def _union(options: tuple[Any, ...]) -> Cast:
    casts = [cast_for(option) for option in options if option is not NoneType]
    optional = NoneType in options

    def cast(value: Any) -> Any:
        if value is None and optional:
            return None
        expected = []
        for attempt in casts:
            try:
                return attempt(value)
            except NotOfType as error:
                expected.append(str(error))
        raise NotOfType(" or ".join(expected))

    return cast


def _list_of(cast_element: Cast) -> Cast:
    def cast(value: Any) -> list[Any]:
        if cast_element is _str and isinstance(value, str) and not value.startswith("["):
            return [value]
        elements = _parsed(value) if isinstance(value, str) else value
        if not isinstance(elements, list):
            raise NotOfType("a list")
        _limit_elements(elements)
        try:
            return [cast_element(element) for element in elements]
        except NotOfType as error:
            raise NotOfType(f"each element to be {error}") from None

    return cast


def _dict_of(cast_key: Cast, cast_value: Cast) -> Cast:
    def cast(value: Any) -> dict[Any, Any]:
        members = _object(value)
        _limit_elements(members)
        return {cast_key(key): cast_value(member) for key, member in members.items()}

    return cast


def _built_by(type_: type) -> Cast:
    known = {each.name for each in fields(type_) if each.init}

    def cast(value: Any) -> Any:
        members = _object(value)
        if not members.keys() <= known:
            raise NotOfType(f"an object with no other keys than {', '.join(sorted(known))}")
        # The engine compiles a grammar for much longer than it is read here.
        _limit_bytes(members)
        try:
            return type_(**members)
        except (TypeError, ValueError) as error:
            raise NotOfType(f"something valid: {first_mistake(error)}") from None

    return cast


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in (0, 1):
        return bool(value)
    if isinstance(value, str) and (truth := TRUTHS.get(value.strip().lower())) is not None:
        return truth
    raise NotOfType("true or false")


TRUTHS = {"true": True, "false": False, "1": True, "0": False}


def _int(value: Any) -> int:
    number = _number(value, int)
    if isinstance(number, float) and not number.is_integer():
        raise NotOfType("an integer")
    number = int(number)
    if number not in INT64:
        raise NotOfType("an integer of 64 bits")
    return number


def _float(value: Any) -> float:
    number = float(_number(value, float))
    if not math.isfinite(number):
        raise NotOfType("a finite number")
    return number


def _number(value: Any, type_: type[int] | type[float]) -> int | float:
    """The number in `value`; a boolean counts as 0 or 1, as it does in Triton's backend."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, str):
        for parse in (int, float):
            try:
                return parse(value)
            except ValueError:
                continue
    raise NotOfType("an integer" if type_ is int else "a number")


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise NotOfType("a string")
    return value


def _as_it_is(value: Any) -> Any:
    _limit_bytes(value)
    return value


PLAIN: dict[Any, Cast] = {bool: _bool, int: _int, float: _float, str: _str}


def _object(value: Any) -> dict[str, Any]:
    members = _parsed(value) if isinstance(value, str) else value
    if not isinstance(members, dict):
        raise NotOfType("an object")
    return members


def _parsed(text: str) -> Any:
    """A list or an object in a string: the v2 protocol has no other form for them."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise NotOfType(f"valid JSON ({error})") from None


def _limit_elements(found: Sized) -> None:
    """Refuse a value that would block the event loop for too long."""
    if len(found) > MAX_ELEMENTS:
        raise NotOfType(f"at most {MAX_ELEMENTS} elements")


def _limit_bytes(value: Any) -> None:
    if len(orjson.dumps(value)) > MAX_OBJECT_BYTES:
        raise NotOfType(f"at most {MAX_OBJECT_BYTES} bytes of JSON")


def _without_empty(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without LiteLLM's empty word lists; `stop_words` becomes `stop`."""
    kept = dict(given)
    for name in IGNORED_IF_EMPTY:
        if kept.get(name) in ([""], [], ""):
            del kept[name]
    if "stop_words" in kept:
        kept.setdefault("stop", kept.pop("stop_words"))
    return kept


def _check_size(name: str, value: int | None, limit: int) -> None:
    if value is not None and value > limit:
        raise _invalid(f"{name}={value} is more than the {limit} that one request may ask for")


def _check_strings(name: str, value: str | list[str] | None) -> None:
    strings = [value] if isinstance(value, str) else value or []
    _check_size(f"the number of strings in '{name}'", len(strings), MAX_STRINGS)
    for string in strings:
        _check_size(f"the length of a string in '{name}'", len(string), MAX_STRING_LENGTH)


def _check_transfers(extra: Mapping[str, Any] | None) -> None:
    # vLLM does not check the type of these two.
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if not isinstance((extra or {}).get(name) or {}, dict):
            raise _invalid(f"'{name}' in 'extra_args' must be an object")


def _show(value: Any) -> str:
    try:
        text = orjson.dumps(value).decode() if isinstance(value, list | dict) else repr(value)
    except orjson.JSONEncodeError:
        text = f"a nested {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _invalid(message: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, message)
