"""The load of a model at its replica: durations, tokens, and the prefixes that its engine holds."""

import math
from collections.abc import Iterable

import pytest

from gateway.backend import ExportedMetric, MetricReading
from gateway.fleet.keys import KEY_BYTES, PIECE_BYTES
from gateway.fleet.meter import CACHE_SIZE, GAUGE_SECS, KV_USED, WINDOW_SECS, LoadMeter
from gateway.fleet.offers import FIRST_STEP_SECS, offer
from gateway.fleet.prefixes import KeyChanges
from gateway.messages import InferResponse, RoutedPrompt, Usage
from gateway.models.instance_groups import InstanceSlot
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from gateway.policy.tenants import TenantRules, Tenants
from tests.builders import TEXT, ScriptedInstance, text_request
from tests.conftest import Serve

KEY_TOKENS = PIECE_BYTES // 4


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.secs = 100.0

    def __call__(self) -> float:
        return self.secs


def unheard() -> None:
    """A change of the load."""


@pytest.fixture
def model() -> Model:
    return Model(TEXT, 1, ModelStatistics(), [])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(model: Model, clock: Clock) -> LoadMeter:
    return LoadMeter(model, unheard, clock)


def prompt(*numbers: int) -> RoutedPrompt:
    """A prompt with a key for each number."""
    return RoutedPrompt(PIECE_BYTES * len(numbers), tuple(map(key, numbers)))


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def usage(tokens: int, cached: int | None = 0) -> InferResponse:
    return InferResponse(usage=Usage(tokens, 1, "", cached))


def compute(meter: LoadMeter, clock: Clock, asked: RoutedPrompt, secs: float, cached: int) -> None:
    """As if the engine had computed a prompt of `KEY_TOKENS` for each key in that time."""
    metered = meter.begin(asked)
    clock.secs += secs
    metered.respond(usage(KEY_TOKENS * len(asked.keys), cached))
    metered.end()


def answer(model: Model, count: int, secs: float) -> None:
    """As if the model had answered requests of this duration, after a second in the queue."""
    model.statistics.success.count += count
    model.statistics.success.ns += round(count * (secs + 1) * 1e9)
    model.statistics.queue.count += count
    model.statistics.queue.ns += round(count * 1e9)


def test_the_step_is_the_mean_of_the_window_without_the_queue(model: Model) -> None:
    clock = Clock()
    meter = LoadMeter(model, unheard, clock)
    assert meter.load().step_secs == FIRST_STEP_SECS
    answer(model, 4, 0.5)
    assert meter.load().step_secs == pytest.approx(0.5)
    clock.secs += WINDOW_SECS - 1
    answer(model, 4, 0.1)
    assert meter.load().step_secs == pytest.approx(0.3)
    clock.secs += WINDOW_SECS - 1
    assert meter.load().step_secs == pytest.approx(0.1)


def test_a_load_names_the_room(model: Model) -> None:
    load = LoadMeter(model, unheard).load()
    assert (load.seen, load.queued, load.room) == (0, 0, model.most_in_flight)


def test_a_model_that_tenants_share_names_the_room_of_all_of_them() -> None:
    """One of them with the limit in flight leaves the others theirs."""
    tenants = Tenants()
    model = Model(TEXT, 1, ModelStatistics(), [], tenants=tenants)
    meter, most = LoadMeter(model, unheard), model.most_in_flight
    assert (meter.load().room, offer(model).most_in_flight) == (most, most)
    tenants.replace({"a": TenantRules()})
    assert (meter.load().room, offer(model).most_in_flight) == (2 * most, 2 * most)


def test_a_model_without_tokens_has_no_rate_and_announces_no_prefixes(meter: LoadMeter) -> None:
    assert not meter.has_tokens
    assert meter.load().prefill_rate == 0
    assert not meter.take_prefixes()


def test_the_rate_is_of_the_time_in_which_prompts_waited(meter: LoadMeter, clock: Clock) -> None:
    compute(meter, clock, prompt(*range(10)), 2.0, 0)
    assert meter.load().prefill_rate == pytest.approx(5 * KEY_TOKENS)
    clock.secs += 3  # nothing waits
    compute(meter, clock, prompt(*range(10, 20)), 1.0, 0)
    assert meter.load().prefill_rate == pytest.approx(20 * KEY_TOKENS / 3)


def test_the_rate_outlasts_a_time_without_prompts(meter: LoadMeter, clock: Clock) -> None:
    compute(meter, clock, prompt(*range(10)), 1.0, 0)
    clock.secs += 10 * WINDOW_SECS
    assert meter.load().prefill_rate == pytest.approx(10 * KEY_TOKENS)
    compute(meter, clock, prompt(90), 0.0, 0)
    assert meter.load().prefill_rate == pytest.approx(10 * KEY_TOKENS)
    clock.secs += 10 * WINDOW_SECS
    compute(meter, clock, prompt(*range(20, 30)), 4.0, 0)
    assert meter.load().prefill_rate == pytest.approx(2.5 * KEY_TOKENS)


def test_a_prompt_that_is_not_computed_yet_does_not_lower_the_rate(
    meter: LoadMeter, clock: Clock
) -> None:
    compute(meter, clock, prompt(*range(10)), 1.0, 0)
    meter.begin(prompt(*range(20, 90)))
    clock.secs += 5
    assert meter.load().prefill_rate == pytest.approx(10 * KEY_TOKENS)


def test_cached_tokens_are_not_computed(meter: LoadMeter, clock: Clock) -> None:
    compute(meter, clock, prompt(*range(10)), 1.0, 9 * KEY_TOKENS)
    assert meter.load().prefill_rate == pytest.approx(KEY_TOKENS)


def test_waiting_tokens_are_those_of_prompts_without_a_response_and_without_a_prefix(
    meter: LoadMeter, clock: Clock
) -> None:
    compute(meter, clock, prompt(1, 2, 3, 4), 1.0, 0)
    known, new = meter.begin(prompt(1, 2, 3, 4, 5, 6)), meter.begin(prompt(11, 12))
    load = meter.load()
    assert (load.waiting_tokens, load.queued) == (4 * KEY_TOKENS, 2)
    known.respond(usage(6 * KEY_TOKENS, 4 * KEY_TOKENS))
    assert meter.load().waiting_tokens == 2 * KEY_TOKENS
    new.end()
    load = meter.load()
    assert (load.waiting_tokens, load.queued) == (0, 0)


def test_waiting_tokens_shrink_when_another_request_computes_the_prefix(
    meter: LoadMeter, clock: Clock
) -> None:
    compute(meter, clock, prompt(90), 1.0, 0)
    first, second = (meter.begin(prompt(1, 2, 3, 4)) for _ in range(2))
    assert meter.load().waiting_tokens == 8 * KEY_TOKENS
    first.respond(usage(4 * KEY_TOKENS))
    assert meter.load().waiting_tokens == 1
    second.respond(usage(4 * KEY_TOKENS, 4 * KEY_TOKENS))
    assert meter.all_prefixes().gained[-4:] == tuple(map(key, (4, 3, 2, 1)))


async def test_requests_with_a_response_are_running(serve: Serve, clock: Clock) -> None:
    model = serve(ScriptedInstance())
    meter = LoadMeter(model, unheard, clock)
    compute(meter, clock, prompt(1), 1.0, 0)
    with model.submit(text_request()), model.submit(text_request()):
        metered = meter.begin(prompt(2))
        load = meter.load()
        assert (load.running, load.queued) == (1, 1)
        assert load.room == model.most_in_flight - 2
        metered.respond(usage(KEY_TOKENS))
        load = meter.load()
        assert (load.running, load.queued) == (2, 0)


def test_the_ratio_of_tokens_to_bytes_is_learned_from_usage(meter: LoadMeter, clock: Clock) -> None:
    long = RoutedPrompt(8 << 20)
    metered = meter.begin(long)
    clock.secs += 1
    metered.respond(usage(4 << 20))
    meter.begin(RoutedPrompt(1000))
    assert meter.load().waiting_tokens == pytest.approx(500, rel=0.01)


def test_the_step_of_a_model_with_tokens_is_the_time_between_two(
    model: Model, meter: LoadMeter, clock: Clock
) -> None:
    compute(meter, clock, prompt(1), 1.0, 0)
    assert meter.load().step_secs == FIRST_STEP_SECS
    for secs in (0.01, 0.03):
        model.statistics.inter_token.observe(secs)
    assert meter.load().step_secs == pytest.approx(0.02)
    clock.secs += 5 * WINDOW_SECS
    meter.load()
    assert meter.load().step_secs == pytest.approx(0.02)


def test_a_computed_prompt_is_a_prefix_and_its_change_is_announced_once(
    meter: LoadMeter, clock: Clock
) -> None:
    compute(meter, clock, prompt(1, 2), 1.0, 0)
    assert set(meter.take_prefixes().gained) == {key(1), key(2)}
    assert not meter.take_prefixes()
    assert meter.all_prefixes() == KeyChanges((key(2), key(1)), reset=True)


class MeasuredInstance(ScriptedInstance):
    """An instance with the gauges of vLLM."""

    used = 0.25
    blocks = "128"
    caching = "True"

    @property
    def metrics(self) -> Iterable[ExportedMetric]:
        used = MetricReading(KV_USED, "", "gauge")
        used.add_sample(KV_USED, {}, self.used)
        labels = {"num_gpu_blocks": self.blocks, "block_size": "16"}
        size = MetricReading(CACHE_SIZE, "", "gauge")
        size.add_sample(CACHE_SIZE, {**labels, "enable_prefix_caching": self.caching}, 1.0)
        return (used, size)


def measured(instance: MeasuredInstance, clock: Clock) -> LoadMeter:
    slot = InstanceSlot(_no_load, instance=instance)
    return LoadMeter(Model(TEXT, 1, ModelStatistics(), [slot]), unheard, clock)


async def _no_load() -> ScriptedInstance:
    raise AssertionError("nothing is loaded")


async def test_the_used_share_of_the_cache_is_read_again_after_some_seconds(clock: Clock) -> None:
    instance = MeasuredInstance()
    meter = measured(instance, clock)
    compute(meter, clock, prompt(1), 1.0, 0)
    assert meter.load().kv_used == 0.25
    instance.used = 7.0
    assert meter.load().kv_used == 0.25
    clock.secs += GAUGE_SECS
    assert meter.load().kv_used == 1.0


@pytest.mark.parametrize(("blocks", "caching", "held"), [("128", "True", 8), ("128", "False", 1)])
async def test_the_list_has_the_size_of_the_engines_cache(
    clock: Clock, blocks: str, caching: str, held: int
) -> None:
    instance = MeasuredInstance()
    instance.blocks, instance.caching = blocks, caching
    meter = measured(instance, clock)
    compute(meter, clock, prompt(*range(40)), 1.0, 0)
    meter.take_prefixes()
    assert len(meter.all_prefixes().gained) == held


async def test_the_list_is_shorter_if_the_engine_found_less_in_its_cache(clock: Clock) -> None:
    meter, chain = measured(MeasuredInstance(), clock), prompt(*range(8))
    compute(meter, clock, chain, 1.0, 0)
    compute(meter, clock, chain, 1.0, 3 * KEY_TOKENS)
    meter.take_prefixes()
    assert meter.all_prefixes().gained == (key(2), key(1), key(0))


async def test_requests_that_arrived_together_do_not_correct_the_list(clock: Clock) -> None:
    meter, chain = measured(MeasuredInstance(), clock), prompt(*range(8))
    both = [meter.begin(chain) for _ in range(2)]
    clock.secs += 1
    for each in both:
        each.respond(usage(8 * KEY_TOKENS))
    meter.take_prefixes()
    assert len(meter.all_prefixes().gained) == 8


async def test_an_engine_that_does_not_report_its_size_has_a_list_of_the_default(
    clock: Clock,
) -> None:
    instance = MeasuredInstance()
    instance.blocks = "None"
    meter = measured(instance, clock)
    compute(meter, clock, prompt(*range(40)), 1.0, 0)
    meter.take_prefixes()
    assert len(meter.all_prefixes().gained) == 40


async def test_new_instances_of_a_model_hold_nothing(clock: Clock) -> None:
    slot = InstanceSlot(_no_load, instance=ScriptedInstance())
    model = Model(TEXT, 1, ModelStatistics(), [slot])
    meter = LoadMeter(model, unheard, clock)
    compute(meter, clock, prompt(1, 2), 1.0, 0)
    assert meter.take_prefixes()
    slot.instance = ScriptedInstance()
    assert meter.take_prefixes() == KeyChanges(reset=True)


def test_a_meter_knows_the_time_since_it_saw_a_further_execution(
    model: Model, meter: LoadMeter, clock: Clock
) -> None:
    assert meter.idle_secs() == math.inf
    model.statistics.last_inference_ms = 5
    clock.secs += 1
    assert meter.idle_secs() == 0
    clock.secs += 2
    assert meter.idle_secs() == 2
    model.statistics.last_inference_ms = 4  # another process has set the clock back
    assert meter.idle_secs() == 0
