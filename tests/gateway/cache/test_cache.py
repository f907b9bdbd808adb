"""Keys of requests, and the encoding of responses."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.cache.cache import (
    Lookup,
    Tally,
    decode,
    encode,
    load_key,
    portable,
    request_key,
)
from gateway.messages import InferRequest, InferResponse, RequestedOutput, Usage
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor
from tests.builders import text_response

LOAD = load_key("m", "1", b"load")
A = Tensor("A", Datatype.INT32, (1, 2), bytes(8))
B = Tensor("B", Datatype.INT32, (2,), b"\x01" * 8)
REQUEST = InferRequest(
    model="m", inputs=(A, B), outputs=(RequestedOutput("X"),), parameters={"k": 1}
)


def key(**fields: Any) -> bytes:
    return request_key(LOAD, replace(REQUEST, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": (A,)},
        {"inputs": (replace(A, name="C"), B)},
        {"inputs": (replace(A, datatype=Datatype.UINT32), B)},
        {"inputs": (replace(A, shape=(2, 1)), B)},
        {"inputs": (replace(A, data=bytes(7) + b"\x01"), B)},
        {"inputs": (replace(A, data=B.data), replace(B, data=A.data))},
        {"outputs": ()},
        {"outputs": (RequestedOutput("Y"),)},
        {"outputs": (RequestedOutput("X"), RequestedOutput("Y"))},
        {"parameters": {}},
        {"parameters": {"k": 2}},
        {"parameters": {"k": True}},
        {"parameters": {"k": "1"}},
        {"parameters": {"k": 1, "l": [{"deep": 1}]}},
    ],
)
def test_requests_that_a_model_can_distinguish_have_different_keys(fields: dict[str, Any]) -> None:
    assert key(**fields) != key()


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": (B, A)},
        {"inputs": (replace(A, data=bytearray(8)), replace(B, data=memoryview(b"\x01" * 8)))},
        {"outputs": (RequestedOutput("X", classes=3),)},
        {"id": "other"},
        {"priority": 1, "timeout_us": 9, "received_ns": 7, "version": "1"},
    ],
)
def test_request_data_without_effect_is_not_in_the_key(fields: dict[str, Any]) -> None:
    assert key(**fields) == key()


def test_texts_have_one_key_in_either_form_but_not_if_cut_elsewhere() -> None:
    parts, wire = text_tensor("T", ["a", "bc"]), text_tensor("T", ["a", "bc"]).raw()
    other = text_tensor("T", ["ab", "c"])
    assert key(inputs=(parts,)) == key(inputs=(replace(parts, data=wire),))
    assert key(inputs=(parts,)) != key(inputs=(other,))


@pytest.mark.parametrize("other", [("n", "1", b"load"), ("m", "2", b"load"), ("m", "1", b"next")])
def test_models_versions_and_loads_have_keys_of_their_own(other: tuple[str, str, bytes]) -> None:
    assert request_key(load_key(*other), REQUEST) != request_key(LOAD, REQUEST)


def test_a_portable_answer_owns_its_memory() -> None:
    array = np.arange(4, dtype=np.float32)
    made = InferResponse(
        outputs=(array_tensor("X", Datatype.FP32, array),), usage=Usage(3, 2), parameters={"p": 1}
    )
    kept = portable(made)
    array[:] = 9
    assert kept.outputs[0].array().tolist() == [0, 1, 2, 3]
    assert (kept.final, kept.usage, kept.parameters) == (True, None, {"p": 1})


@pytest.mark.parametrize(
    "response",
    [
        text_response("one", final=True),
        InferResponse(
            outputs=(
                array_tensor("X", Datatype.FP64, np.arange(6.0).reshape(2, 3)),
                Tensor("empty", Datatype.BF16, (0, 4), b""),
                Tensor("Ü", Datatype.BOOL, (), b"\x01"),
            ),
            parameters={"s": "ü\ud800", "f": float("inf"), "b": False, "i": -(2**63)},
            final=True,
        ),
    ],
)
def test_a_response_survives_its_encoding(response: InferResponse) -> None:
    kept = portable(response)
    assert decode(encode(kept)) == kept


def test_bytes_that_are_no_answer_are_refused() -> None:
    good = encode(portable(text_response("some text", final=True)))
    chance = random.Random(1)
    for bad in (b"", b"\xff" * 40, good[:-1], good + b"x", good[1:], b"\x02\0\0\0\0\0\0\0[]"):
        with pytest.raises(ValueError, match=r"."):
            decode(bad)
    for _ in range(2000):
        changed = bytearray(good)
        changed[chance.randrange(40)] = chance.randrange(256)
        try:
            decode(bytes(changed))
        except ValueError:
            continue


def test_an_answer_with_a_parameter_of_no_protocol_is_not_encoded() -> None:
    odd: Any = {"p": object()}
    with pytest.raises(ValueError, match="serializable"):
        encode(replace(portable(text_response("x")), parameters=odd))


def test_a_lookup_is_settled_once() -> None:
    lookup, told = Lookup(), []
    assert not lookup.missed
    lookup.then(lambda: told.append("later"))
    lookup.settle(None)
    lookup.settle(text_response("too late"))
    lookup.then(lambda: told.append("at once"))
    assert (told, lookup.missed) == (["later", "at once"], True)


def test_a_tally_is_read_in_microseconds() -> None:
    tally = Tally(evictions=4, insertion_ns=2_999)
    tally.looked_up(1_500, found=True)
    tally.looked_up(1_500, found=False)
    found = tally.reading(entries=7, utilization=0.5)
    assert (found.lookups, found.hits, found.misses) == (2, 1, 1)
    assert (found.lookup_us, found.insertion_us) == (3, 2)
    assert (found.entries, found.evictions, found.utilization) == (7, 4, 0.5)
    elsewhere = tally.reading()
    assert (elsewhere.entries, elsewhere.evictions, elsewhere.utilization) == (None, None, None)
