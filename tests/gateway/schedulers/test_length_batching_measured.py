"""Instances are measured with batches of zeros, for a bounded time."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from gateway.backend import Answer, Instance
from gateway.batches.padding import Padding
from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.schedulers import length_batching as measuring
from gateway.schedulers.batching import Batching, FirstComeBatching
from gateway.schedulers.length_batching import (
    BatchCost,
    BatchRules,
    BatchTime,
    LengthBatching,
    is_enough,
    measure,
    sample,
    sizes,
)
from tests.builders import soon
from tests.gateway.schedulers.queues import TOKENS, dynamic

PADDING = Padding.read(TOKENS)


class Encoder(Instance):
    """An encoder of a constant time per batch that fails from a number of tokens on."""

    def __init__(
        self, fails_from: int = 10**9, hangs: bool = False, batch_secs: float = 0.0
    ) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.closed = 0
        self._fails_from = fails_from
        self._hangs = hangs
        self._batch_secs = batch_secs

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        (request,) = requests
        tensor = request.inputs[0]
        self.shapes.append(tensor.shape)
        try:
            if self._hangs:
                await asyncio.Event().wait()
            await asyncio.sleep(self._batch_secs)
        finally:
            self.closed += 1
        if tensor.count >= self._fails_from:
            raise InferenceError(Code.INTERNAL, "no memory")
        yield 0, InferResponse(outputs=request.inputs, final=True)

    async def close(self) -> None:
        """Nothing is held."""


def test_sizes_double_first_in_rows_and_then_in_length() -> None:
    assert list(sizes(4)) == [(1, 64), (2, 64), (4, 64), (4, 128), (4, 256)]
    assert list(sizes(1)) == [(1, 64), (1, 128), (1, 256)]
    assert list(sizes(6))[:4] == [(1, 64), (2, 64), (4, 64), (4, 128)]


def test_sizes_are_no_longer_than_the_model_takes() -> None:
    assert list(sizes(2, longest=128)) == [(1, 64), (2, 64), (2, 128)]
    assert list(sizes(2, longest=5)) == [(1, 5), (2, 5)]


def test_it_is_enough_when_larger_batches_do_not_pay() -> None:
    assert not is_enough([BatchTime(64, 1.0)])
    assert not is_enough([BatchTime(64, 1.0), BatchTime(128, 2.2)])
    assert is_enough([BatchTime(64, 1.0), BatchTime(128, 2.0), BatchTime(256, 5.5)])


def test_a_sample_has_ones_in_its_mask_and_zeros_elsewhere() -> None:
    config = replace(
        TOKENS,
        input=(
            *TOKENS.input,
            ModelInput(name="scale", data_type=DataType.TYPE_FP16, dims=(-1, 3)),
            ModelInput(name="language", data_type=DataType.TYPE_STRING, dims=(1,)),
            ModelInput(name="brain", data_type=DataType.TYPE_BF16, dims=(2,)),
            ModelInput(name="extra", data_type=DataType.TYPE_INT8, dims=(1,), optional=True),
        ),
    )
    request = sample(config, PADDING, rows=2, length=5)
    arrays = {each.name: each.array() for each in request.inputs}
    assert {name: array.shape for name, array in arrays.items()} == {
        "ids": (2, 5),
        "mask": (2, 5),
        "scale": (2, 1, 3),
        "language": (2, 1),
        "brain": (2, 2),
    }
    assert arrays["ids"].sum() == 0
    assert arrays["mask"].sum() == 10
    assert arrays["language"].tolist() == [[b""], [b""]]
    assert all(len(each.raw()) for each in request.inputs)


async def test_sizes_grow_and_then_all_are_run_again_round_by_round() -> None:
    encoder = Encoder()
    config = replace(TOKENS, max_batch_size=2)
    points = await soon(measure(encoder, config, PADDING))
    count = len(points)
    assert [each.tokens for each in points] == [64, 128, 256, 512][:count]
    growing, again = encoder.shapes[: 2 * count], encoder.shapes[2 * count :]
    assert growing == [shape for shape in again[:count] for _ in range(2)]
    assert again == again[:count] * measuring.ROUNDS
    assert all(0 < each.seconds < 1 for each in points)


async def test_no_larger_batches_are_tried_when_half_of_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "GROWING_SECS", 0.0)
    encoder = Encoder()
    points = await soon(measure(encoder, TOKENS, PADDING))
    assert [each.tokens for each in points] == [64]
    assert set(encoder.shapes) == {(1, 64)}


async def test_a_batch_that_fails_ends_the_measurement_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder = Encoder(fails_from=128)
    with caplog.at_level(logging.WARNING):
        points = await soon(measure(encoder, TOKENS, PADDING))
    assert [each.tokens for each in points] == [64]
    (record,) = caplog.records
    assert "no memory" in vars(record)["reason"]


async def test_a_batch_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LIMIT_SECS", 0.01)
    encoder = Encoder(hangs=True)
    assert await soon(measure(encoder, TOKENS, PADDING)) == []
    assert encoder.closed == 1


MEASURED = replace(TOKENS, parameters={"padded_inputs": '{"ids": 0, "mask": 0}'})


def of(found: BatchRules, instance: Instance) -> Batching:
    """The rules of an instance."""
    return found.measured.get(instance, found.usual)


def rules(config: ModelConfig) -> BatchRules:
    assert config.dynamic_batching is not None
    return BatchRules(config, config.dynamic_batching)


async def test_instances_are_measured_as_if_others_executed() -> None:
    class Sharing(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.is_shared = False
            self.seen: set[bool] = set()
            self.sharing = self._share()

        @contextmanager
        def _share(self) -> Iterator[None]:
            self.is_shared = True
            yield
            self.is_shared = False

        def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
            self.seen.add(self.is_shared)
            return super().execute(requests)

    encoder = Sharing()
    await soon(rules(replace(MEASURED, max_batch_size=2)).prepare(encoder))
    assert (encoder.seen, encoder.is_shared) == ({True}, False)


async def test_without_padded_inputs_nothing_is_measured() -> None:
    found, encoder = rules(dynamic()), Encoder()
    await soon(found.prepare(encoder))
    assert isinstance(of(found, encoder), FirstComeBatching)
    assert encoder.shapes == []


async def test_a_budget_that_is_given_is_not_measured() -> None:
    found, encoder = rules(TOKENS), Encoder()
    await soon(found.prepare(encoder))
    batching = of(found, encoder)
    assert isinstance(batching, LengthBatching)
    assert batching.cost.budget == 100
    assert encoder.shapes == []


async def test_each_instance_has_the_budget_that_was_measured_for_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine few batches would fit into the time of a measurement."""
    for limit in ("GROWING_SECS", "LIMIT_SECS"):
        monkeypatch.setattr(f"gateway.schedulers.length_batching.{limit}", 60.0)
    monkeypatch.setattr("gateway.schedulers.length_batching.ROUNDS", 1)
    found = rules(MEASURED)
    encoder, failing = Encoder(batch_secs=0.05), Encoder(fails_from=1)
    with caplog.at_level(logging.INFO):
        await soon(found.prepare(encoder))
        await soon(found.prepare(failing))
    batching, assumed = of(found, encoder), of(found, failing)
    assert isinstance(batching, LengthBatching)
    assert isinstance(assumed, LengthBatching)
    assert assumed.cost == BatchCost.assumed()
    lines = [vars(each) for each in caplog.records if each.message == "batches measured"]
    assert [line["token_budget"] for line in lines] == [batching.cost.budget, assumed.cost.budget]
    assert batching.cost.budget in lines[0]["tokens_per_second"]


async def test_an_instance_that_has_died_is_forgotten() -> None:
    found, encoder = rules(MEASURED), Encoder()
    await soon(found.prepare(encoder))
    measured = of(found, encoder)
    found.forget(encoder)
    assert of(found, encoder) is not measured


def test_padding_that_cannot_be_is_refused() -> None:
    with pytest.raises(InferenceError, match="padded_inputs"):
        rules(replace(TOKENS, parameters={"padded_inputs": "ids"}))
