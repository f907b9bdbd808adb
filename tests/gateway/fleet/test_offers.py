"""Loads and offers of a replica, and their forms on the wire."""

import math
from dataclasses import replace

import msgspec
import pytest

from gateway.config import ModelConfig
from gateway.fleet.choice import ReplicaState
from gateway.fleet.offers import (
    FIRST_STEP_SECS,
    WINDOW_SECS,
    LoadMeter,
    ModelOffer,
    Offers,
    first_load,
    offer,
    read_load,
    read_offers,
    write_load,
    write_offers,
)
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from tests.builders import TEXT

KEY = ("echo", 3)
OFFER = ModelOffer("echo", 3, "", {"y": ("a", "b")}, ("adapter",), 0, "")


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.secs = 100.0

    def __call__(self) -> float:
        return self.secs


@pytest.fixture
def model() -> Model:
    return Model(TEXT, 1, ModelStatistics(), [])


def answer(model: Model, count: int, secs: float) -> None:
    """As if the model had answered requests of this duration, after a second in the queue."""
    model.statistics.success.count += count
    model.statistics.success.ns += round(count * (secs + 1) * 1e9)
    model.statistics.queue.count += count
    model.statistics.queue.ns += round(count * 1e9)


def test_offers_and_loads_are_read_as_written() -> None:
    offers = Offers(ReplicaState.DRAINING, (OFFER,))
    assert read_offers(write_offers(offers)) == offers
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


def test_the_step_is_the_mean_of_the_window_without_the_queue(model: Model) -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    assert meter.load(model, 0).step_secs == FIRST_STEP_SECS
    answer(model, 4, 0.5)
    assert meter.load(model, 0).step_secs == pytest.approx(0.5)
    clock.secs += WINDOW_SECS - 1
    answer(model, 4, 0.1)
    assert meter.load(model, 0).step_secs == pytest.approx(0.3)
    clock.secs += WINDOW_SECS - 1
    assert meter.load(model, 0).step_secs == pytest.approx(0.1)


def test_a_load_names_the_latest_call_and_the_room(model: Model) -> None:
    load = LoadMeter().load(model, 9)
    assert (load.seen, load.queued, load.room) == (9, 0, model.most_in_flight)
