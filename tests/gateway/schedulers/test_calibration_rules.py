"""Each instance forms its batches by what is known of it."""

import logging
from dataclasses import replace

import pytest

from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.schedulers.batching import FirstComeBatching
from gateway.schedulers.calibration import BatchRules
from gateway.schedulers.length_batching import Cost, LengthBatching
from tests.builders import soon
from tests.gateway.schedulers.queues import TOKENS, dynamic
from tests.gateway.schedulers.test_calibration import Encoder

MEASURED = replace(TOKENS, parameters={"padded_inputs": '{"ids": 0, "mask": 0}'})


def rules(config: ModelConfig) -> BatchRules:
    assert config.dynamic_batching is not None
    return BatchRules(config, config.dynamic_batching)


async def test_without_padded_inputs_nothing_is_measured() -> None:
    found, encoder = rules(dynamic()), Encoder()
    await soon(found.prepare(encoder))
    assert isinstance(found.of(encoder), FirstComeBatching)
    assert encoder.shapes == []


async def test_a_budget_that_is_given_is_not_measured() -> None:
    found, encoder = rules(TOKENS), Encoder()
    await soon(found.prepare(encoder))
    batching = found.of(encoder)
    assert isinstance(batching, LengthBatching)
    assert batching.cost.budget == 100
    assert encoder.shapes == []


async def test_each_instance_has_the_budget_that_was_measured_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, encoder, failing = rules(MEASURED), Encoder(), Encoder(fails_from=1)
    with caplog.at_level(logging.INFO):
        await soon(found.prepare(encoder))
        await soon(found.prepare(failing))
    batching, assumed = found.of(encoder), found.of(failing)
    assert isinstance(batching, LengthBatching)
    assert isinstance(assumed, LengthBatching)
    assert assumed.cost == Cost.assumed()
    lines = [vars(each) for each in caplog.records if each.message == "batches measured"]
    assert [line["token_budget"] for line in lines] == [batching.cost.budget, assumed.cost.budget]
    assert batching.cost.budget in lines[0]["tokens_per_second"]


async def test_an_instance_that_has_died_is_forgotten() -> None:
    found, encoder = rules(MEASURED), Encoder()
    await soon(found.prepare(encoder))
    measured = found.of(encoder)
    found.forget(encoder)
    assert found.of(encoder) is not measured


def test_padding_that_cannot_be_is_refused() -> None:
    with pytest.raises(InferenceError, match="padded_inputs"):
        rules(replace(TOKENS, parameters={"padded_inputs": "ids"}))
