"""Loads and offers of a replica, and their forms on the wire."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest

from gateway.config import (
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    ModelResponseCache,
    TransactionPolicy,
)
from gateway.config.pbtxt import to_text
from gateway.fleet import offers
from gateway.fleet.choice import ReplicaState
from gateway.fleet.keys import PrefixScope
from gateway.fleet.offers import (
    ModelOffer,
    Offers,
    first_load,
    offer,
    read_load,
    read_offers,
    read_prefixes,
    write_load,
    write_offers,
    write_prefixes,
)
from gateway.fleet.prefixes import HeldPrefixes, KeyChanges
from gateway.fleet.prompts import keys_of_fleet
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from tests.builders import TEXT

KEY = ("echo", 3)
OFFER = ModelOffer("echo", 3, "", {"y": ("a", "b")}, ("adapter",), 0, "")


@pytest.fixture
def model() -> Model:
    return Model(TEXT, 1, ModelStatistics(), [])


def test_offers_and_loads_are_read_as_written() -> None:
    written = Offers(ReplicaState.DRAINING, (OFFER,))
    assert read_offers(write_offers(written)) == written
    load = replace(first_load(OFFER), seen=7, queued=2, step_secs=0.5)
    assert read_load(write_load(KEY, load)) == (KEY, load)


def test_an_offer_has_the_completed_configuration(model: Model) -> None:
    found = offer(model)
    assert found.key == (TEXT.name, 1)
    assert isinstance(TEXT, ModelConfig)
    assert f'name: "{TEXT.name}"' in found.config
    assert found.trouble


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (2, -1, "seen"),
        (5, -1, "queued"),
        (7, math.nan, "step_secs"),
        (7, 1e9, "step_secs"),
        (9, -5, "room"),
        (6, "fast", "cannot be read"),
    ],
)
def test_a_load_that_no_replica_can_have_is_refused(field: int, value: object, reason: str) -> None:
    fields = msgspec.msgpack.decode(write_load(KEY, first_load(OFFER)))
    fields[field] = value
    with pytest.raises(ValueError, match=reason):
        read_load(msgspec.msgpack.encode(fields))


def test_a_load_of_a_later_release_is_read() -> None:
    fields = msgspec.msgpack.decode(write_load(KEY, first_load(OFFER)))
    assert read_load(msgspec.msgpack.encode([*fields, "new"]))[0] == KEY


@pytest.mark.parametrize(
    ("changed", "is_other"),
    [
        ({"instance_group": (InstanceGroup(count=2),)}, False),
        ({"dynamic_batching": DynamicBatching()}, False),
        ({"parameters": {"replicas": "2", "engine": "fast"}}, False),
        ({"parameters": {"continue_tries": "0"}}, True),
        ({"max_batch_size": 4}, True),
        ({"output": ()}, True),
        ({"backend": "python"}, True),
        ({"model_transaction_policy": TransactionPolicy(decoupled=True)}, True),
        ({"response_cache": ModelResponseCache(enable=True)}, True),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_interface_of_an_offer_is_that_which_requests_and_routers_depend_on(
    changed: dict[str, Any], is_other: bool
) -> None:
    digests = [
        msgspec.structs.replace(OFFER, config=to_text(config)).digests
        for config in (TEXT, replace(TEXT, **changed))
    ]
    interfaces, wholes = zip(*digests, strict=True)
    assert (interfaces[0] != interfaces[1]) == is_other
    assert wholes[0] != wholes[1]


def test_offers_of_many_models_that_come_again_are_not_parsed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed = []

    def parse(text: str, source: str) -> ModelConfig:
        parsed.append(text)
        return TEXT

    monkeypatch.setattr(offers, "parse", parse)
    many = [msgspec.structs.replace(OFFER, config=f"# {number}") for number in range(1000)]
    for _ in range(2):
        assert len({each.digests.whole for each in many}) == len(many)
    assert len(parsed) == len(many)


def test_offers_of_other_labels_or_adapters_or_of_no_configuration_have_other_interfaces() -> None:
    found = [OFFER, msgspec.structs.replace(OFFER, labels={"y": ("a", "c")})]
    found += [msgspec.structs.replace(OFFER, adapters=names) for names in (("a",), ("a", "b"))]
    found += [msgspec.structs.replace(OFFER, config=config) for config in ("{", "}")]
    assert len({each.digests.interface for each in found}) == len(found)


def test_prefixes_are_read_as_written() -> None:
    changes = KeyChanges([b"12345678", b"abcdefgh"], [b"ABCDEFGH"], reset=True)
    assert read_prefixes(write_prefixes(KEY, changes)) == (KEY, changes)


@pytest.mark.parametrize(("capacity", "most"), [(100_000, 0.013), (200, 0.02)])
def test_prefixes_take_little_of_the_bytes_of_new_prompts(capacity: int, most: float) -> None:
    keys, held, chance = keys_of_fleet("sluice", b""), HeldPrefixes(capacity), Random(1)
    announced = new = 0
    for turn in range(300):
        text = chance.randbytes(1536).hex()
        held.use(keys.of_text(PrefixScope(model="model", version="1"), text))
        payload = write_prefixes(("model", 1), held.take_changes())
        if turn >= 100:  # a list of 200 keys is full
            announced += len(payload)
            new += len(text)
    assert announced < most * new


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        (2, b"12345678123", "8 bytes"),
        (3, b"1234567", "8 bytes"),
        (2, "text", "cannot be read"),
        (2, bytes(8 * 262_145), "found 262145 keys, expected at most 262144"),
        (3, bytes(8 * 262_145), "found 262145 keys, expected at most 262144"),
    ],
    ids=["half a key", "no key", "no keys", "too many gained", "too many lost"],
)
def test_prefixes_that_are_no_keys_are_refused(field: int, value: object, reason: str) -> None:
    fields = msgspec.msgpack.decode(write_prefixes(KEY, KeyChanges([b"12345678"])))
    fields[field] = value
    with pytest.raises(ValueError, match=reason):
        read_prefixes(msgspec.msgpack.encode(fields))
