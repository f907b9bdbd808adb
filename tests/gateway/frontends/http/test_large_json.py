"""Large JSON texts: parsed in parts, they have the values of the whole."""

import json
import random
import time
import weakref
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import pytest

from gateway.errors import InferenceError
from gateway.frontends.http import json_layout, json_object, large_json
from gateway.frontends.http.json_object import parse_json_object, parse_request
from gateway.frontends.http.large_json import LargeArray, LongString
from tests.builders import uncollected

CUT = (
    b'{"inputs":[{"data":[' + b"1," * (1 << 19),
    b'{"inputs":[{"data":[[1],' + b"[1," * (1 << 18),
    b'{"id":"a","x":"' + b"x" * (1 << 20),
    b'{"x":["' + b"x" * (1 << 20),
)


@pytest.mark.parametrize("body", CUT, ids=["numbers", "nested arrays", "a text", "a text within"])
@pytest.mark.parametrize("parse", [parse_request, parse_json_object])
def test_a_value_without_an_end_is_not_parsed_in_one_call(
    monkeypatch: pytest.MonkeyPatch, body: bytes, parse: Callable[[bytes], Any]
) -> None:
    sizes = []

    class Parser:
        JSONDecodeError = orjson.JSONDecodeError

        @staticmethod
        def loads(text: bytes) -> Any:
            sizes.append(len(text))
            return orjson.loads(text)

    monkeypatch.setattr(json_object, "orjson", Parser)
    with pytest.raises(InferenceError) as caught:
        parse(body)
    assert caught.value.message.startswith("failed to parse the request JSON buffer: ")
    if body is not CUT[1]:
        assert caught.value.message.endswith(f"unexpected end of data at {len(body)}")
    assert max(sizes) < (1 << 18) + 100


LARGE = b'{"inputs":[{"name":"a","shape":[1],"datatype":"FP32","data":[%b1]}]' % (b"1," * (1 << 18))


@pytest.mark.parametrize("end", [b"}", b",}"], ids=["JSON", "no JSON"])
def test_a_large_body_is_freed_without_garbage_collection(end: bytes) -> None:
    body = array("B", LARGE + end)
    freed = weakref.ref(body)
    with uncollected():
        with suppress(InferenceError):
            parse_request(memoryview(body))
        del body
        assert freed() is None


TEXTS = ["a", '"', "\\", "é", "😀", "\n", ":", ",", "[", "]", "{", "}", "xxx"]
DAMAGE = [b"", b",", b"]", b"[", b'"', b"}", b"\\", b"NaN", b" ", b"\xff", b":", b"-Inf,"]
TOO_LARGE = "has an element of more than"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few bytes, so that small texts have many."""
    monkeypatch.setattr(json_layout, "WINDOW_BYTES", 33)
    monkeypatch.setattr(json_layout, "LARGE_ARRAY", 10)
    monkeypatch.setattr(json_layout, "LONG_STRING", 66)
    monkeypatch.setattr(large_json, "PIECE_BYTES", 33)


def value(chance: random.Random, depth: int) -> Any:
    kind = chance.random()
    if kind < 0.3 or depth > 4:
        return chance.choice([1, 2.5, -3, 10**20, True, None, 12345])
    if kind < 0.5:
        return "".join(chance.choices(TEXTS, k=chance.randrange(60)))
    if kind < 0.8:
        return [value(chance, depth + 1) for _ in range(chance.randrange(6))]
    return {f"k{chance.randrange(9)}:": value(chance, depth + 1) for _ in range(3)}


def text(chance: random.Random) -> bytes:
    inputs = [
        {"name": "a:", "shape": [3], "data": [value(chance, 1) for _ in range(20)]}
        for _ in range(chance.randrange(4))
    ]
    found = {"id": value(chance, 9), "inputs": inputs, "x": value(chance, 0)}
    return json.dumps(found, ensure_ascii=chance.random() < 0.5).encode()


def plain(found: Any) -> Any:
    """The parsed value without parts; of cut arrays only the order of their values counts."""
    if isinstance(found, LargeArray):
        return [plain(each) for part in found.parts() for each in part]
    if isinstance(found, LongString):
        return found.text()
    if isinstance(found, dict):
        return {key: plain(each) for key, each in found.items()}
    if isinstance(found, list):
        return [plain(each) for each in found]
    return found


def flat(found: Any) -> list[Any]:
    return [each for part in found for each in flat(part)] if isinstance(found, list) else [found]


def outcome(parse: Any, body: bytes) -> Any:
    try:
        found = plain(parse(body))
    except InferenceError as error:
        return error.message if TOO_LARGE in error.message else "refused"
    for each in found["inputs"] if isinstance(found.get("inputs"), list) else ():
        if parse is parse_request and isinstance(each, dict) and "data" in each:
            each["data"] = flat(each["data"])
    return json.dumps(found)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.usefixtures("small_parts")
def test_parts_have_the_values_of_the_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    body = text(chance)
    if seed % 2:
        at = chance.randrange(len(body))
        body = body[:at] + chance.choice(DAMAGE) + body[at + chance.randrange(2) :]
    for parse in (parse_json_object, parse_request):
        expected = outcome(parse, body)
        with monkeypatch.context() as patched:
            patched.setattr(json_object, "SLICED_BYTES", 0)
            found = outcome(parse, body)
        assert found == expected or TOO_LARGE in found


LONG_NAME = "n" * 70
NUMBERS = "11,12,13,14,15,16,17,18,19"
REPEATED = {
    "a member": '{"id":"a","id":"b","inputs":[]}',
    "a literal elsewhere": f'{{"a":NaN,"id":"a","id":"b","inputs":[{{"data":[{NUMBERS}]}}]}}',
    "a long value": f'{{"id":"{LONG_NAME}","id":"b"}}',
    "a long name": f'{{"{LONG_NAME}":1,"{LONG_NAME}":2}}',
    "a long name with escapes": f'{{"{LONG_NAME}":1,"\\u006e{LONG_NAME[1:]}":2}}',
    "a long name in an input": f'{{"inputs":[{{"{LONG_NAME}":1,"{LONG_NAME}":2}}]}}',
    "inputs": f'{{"inputs":[{{"data":[{NUMBERS}]}}],"inputs":[{{"name":"b"}}]}}',
    "a member of an input": f'{{"inputs":[{{"name":"a","data":[{NUMBERS}],"name":"b"}}]}}',
    "a parameter of an input": '{"inputs":[{"parameters":{"p":1,"p":2}}]}',
    "a large array": f'{{"inputs":[{{"data":[{NUMBERS}],"data":[2{NUMBERS}]}}]}}',
    "a large array before a small one": f'{{"inputs":[{{"data":[{NUMBERS}],"data":[1]}}]}}',
    "a large array behind a small one": f'{{"inputs":[{{"data":[1],"data":[{NUMBERS}]}}]}}',
    "an object in a large array": f'{{"inputs":[{{"data":[{NUMBERS},{{"a":1,"a":2}}]}}]}}',
    "an object in a small array": '{"inputs":[{"data":[{"a":1,"a":2}]}]}',
    "an object in a nested array": f'{{"x":[[[{NUMBERS},{{"a":1,"a":2}}]]]}}',
}


@pytest.mark.parametrize("body", REPEATED.values(), ids=REPEATED)
@pytest.mark.usefixtures("small_parts")
def test_of_members_with_one_name_one_counts_at_any_size(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = json.loads(body, object_pairs_hook=lambda members: dict(reversed(members)))
    for parse, meant in ((parse_request, first), (parse_json_object, json.loads(body))):
        for sliced in (json_object.SLICED_BYTES, 0):
            monkeypatch.setattr(json_object, "SLICED_BYTES", sliced)
            found = plain(parse(body.encode()))
            assert json.dumps(found, sort_keys=True) == json.dumps(meant, sort_keys=True)


def large(data: bytes, **more: object) -> bytes:
    rest = json.dumps(more or {"x": 0}).encode()[1:]
    return b'{"inputs":[{"data":[%b]}],%b' % (data, rest)


def test_of_large_members_with_one_name_the_first_counts() -> None:
    body = b'{"id":"a:b","id":"c",' + large(b"1," * 200_000 + b"1", x=":")[1:]
    found = parse_request(body)
    assert found["id"] == "a:b"
    assert sum(map(len, found["inputs"][0]["data"].parts())) == 200_001


@pytest.mark.parametrize("literal", ["NaN", "-NaN", "Inf", "-Inf", "Infinity", "-Infinity"])
def test_a_large_array_may_have_each_literal(literal: str) -> None:
    body = large(b"1.5," * 100_000 + literal.encode())
    *_, last = parse_request(body)["inputs"][0]["data"].parts()
    expected = float(literal.replace("-NaN", "NaN"))
    assert last[-1] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("end", [b"1,", b",1", b"1 2", b"nope", b"1e999,NaN", b"}"])
def test_a_large_array_is_checked_to_its_end(end: bytes) -> None:
    with pytest.raises(InferenceError, match="failed to parse the request JSON"):
        for _ in parse_request(large(b"1," * 200_000 + end))["inputs"][0]["data"].parts():
            pass


def test_too_many_values_outside_of_data_are_refused() -> None:
    with pytest.raises(InferenceError, match="too many values outside of large arrays"):
        parse_request(b'{"inputs":[' + b"{}," * (json_layout.MOST_VALUES // 2 + 1) + b"{}]}")


def scan_secs(filling: bytes) -> float:
    """Processor time of this thread, at best, to examine a long string of that."""
    body = memoryview(b'{"x":"' + filling * ((4 << 20) // len(filling)) + b'"}')

    def once() -> float:
        began = time.thread_time()
        assert len(json_layout.scan(body, 2, nested=False).strings) == 1
        return time.thread_time() - began

    return min(once() for _ in range(5))


@pytest.mark.parametrize("escapes", [b"\\\\", b'\\"', b'\\n to \\"', b"\\\\\\u0022"])
def test_a_window_of_escapes_is_about_as_fast_as_another(escapes: bytes) -> None:
    assert scan_secs(escapes) < 4 * scan_secs(b"x")
