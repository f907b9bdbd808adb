"""Replicas with real engines have the metrics that an endpoint picker reads."""

import pytest

from tests.e2e.conftest import ADAPTER, MAX_RUNNING
from tests.e2e.figures import wait_at_rest
from tests.e2e.llama import ENDLESS, Llama, every_engine, streamed
from tests.e2e.streams import crowd
from tests.pickers import ADAPTERS, CACHE, QUEUED, RUNNING, USED, picker_metrics
from tests.serving import Serving, wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(240),
    pytest.mark.own_models("the metrics of engines"),
]

WAITING = 4


@every_engine
def test_what_a_picker_reads_moves_with_the_load(
    server: Serving, llama: Llama, engine: str
) -> None:
    metrics = picker_metrics()[engine]
    llama.serves_on()
    wait_at_rest(server)
    assert [metrics[each].value(server) for each in (QUEUED, RUNNING)] == [0, 0]
    adapter = {"lora_name": ADAPTER} if ADAPTERS in metrics else {}
    story = streamed("Once upon a time", **ENDLESS, **adapter)
    with crowd(server, story, MAX_RUNNING + WAITING):
        for flag, wanted in ((RUNNING, MAX_RUNNING), (QUEUED, WAITING)):
            metric = metrics[flag]
            said = f"{metric} is {wanted}"
            wait_until(lambda metric=metric, wanted=wanted: metric.value(server) == wanted, said)
        assert 0 < metrics[USED].value(server) <= 1
        if ADAPTERS in metrics:
            labels = metrics[ADAPTERS].adapters(server)
            assert labels["running_lora_adapters"] == labels["waiting_lora_adapters"] == ADAPTER
            assert int(labels["max_lora"]) >= 1
    wait_at_rest(server)
    assert [metrics[each].value(server) for each in (QUEUED, RUNNING)] == [0, 0]


def test_a_picker_reads_the_size_of_the_cache(server: Serving) -> None:
    (found,) = picker_metrics()["vllm"][CACHE].samples(server)
    assert int(found.labels["block_size"]) > 0
    assert int(found.labels["num_gpu_blocks"]) > 0
