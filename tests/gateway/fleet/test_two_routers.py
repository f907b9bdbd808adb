"""Two routers that have the same replicas, and ends whose clocks differ."""

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, SequenceTag
from tests.builders import soon, text_request, texts
from tests.conformance.models import identity
from tests.gateway.fleet.fake_replica import FakeReplica, until
from tests.gateway.fleet.in_one_loop import pair
from tests.gateway.fleet.routing import routing
from tests.serving import write_model

HOUR_SECS = 3600.0
WAITING = """
max_batch_size: 1
dynamic_batching {
  default_queue_policy {
    timeout_action: REJECT
    default_timeout_microseconds: 30000000
    allow_timeout_override: true
  }
}
"""
TEXT = identity("BYTES", "1", delay_us=300_000)
TEXT = TEXT.replace("INPUT", "text_input").replace("OUTPUT", "text_output") + WAITING


async def test_a_sequence_that_two_routers_begin_at_once_is_at_one_replica(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    async with AsyncExitStack() as owner:
        places = [SimpleNamespace(port=each.port) for each in replicas]
        routers = [await owner.enter_async_context(routing(tmp_path, *places)) for _ in range(2)]
        for number in range(1, 9):
            begin = SequenceTag(number, start=True)
            for each in routers:
                request = replace(text_request(), sequence=begin)
                owner.enter_context(each.dataplane.infer(request))
            await until(lambda: sum(len(each.calls) for each in replicas) == 2)
            assert sorted(len(each.calls) for each in replicas) == [0, 2]
            for each in replicas:
                each.calls.clear()


@pytest.fixture
def _clocks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each look at the clock be an hour apart from the one before."""
    real, hours = time.time, _hours()
    monkeypatch.setattr(time, "time", lambda: real() + next(hours) * HOUR_SECS)


def _hours() -> Iterator[int]:
    for number in count():
        yield number % 2


def with_timeout(timeout_us: int) -> InferRequest:
    (text,) = text_request().inputs
    inputs = (replace(text, shape=(1, 1)),)
    return InferRequest(model="text", inputs=inputs, timeout_us=timeout_us)


@pytest.mark.usefixtures("_clocks_differ")
async def test_timeouts_are_those_of_the_client_if_clocks_are_an_hour_apart(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "text", TEXT)
    (tmp_path / "nothing").mkdir()
    async with pair(tmp_path / "models", tmp_path / "nothing") as (router, replica):
        with (
            router.infer(with_timeout(20_000_000)) as first,
            router.infer(with_timeout(20_000_000)) as patient,
            router.infer(with_timeout(50_000)) as hasty,
        ):
            with pytest.raises(InferenceError, match="timeout") as caught:
                await soon(hasty.batch())
            assert not patient.done
            for each in (first, patient):
                assert texts(await soon(each.batch())) == ["hello"]
        assert caught.value.code is Code.UNAVAILABLE
        await until(lambda: not replica.in_flight)
