"""Executions of several models that need the same resources, and their order."""

import asyncio
from dataclasses import replace

import pytest

from gateway.config import InstanceGroup, ModelConfig, RateLimiter, Resource
from gateway.errors import Code, InferenceError
from gateway.schedulers.rate_limiter import ExecutionLimiter
from gateway.settings import ResourceLimit
from tests.builders import TEXT, Execution, ScriptedInstance, read_all, settle, soon
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import Queue, asked, dynamic, finish

BROKEN = InferenceError(Code.INTERNAL, "broken")


def group(count: int = 1, *, priority: int = 0, name: str = "R") -> InstanceGroup:
    resources = (Resource(name=name, count=count),)
    return InstanceGroup(rate_limiter=RateLimiter(resources=resources, priority=priority))


@pytest.fixture(params=["direct", "dynamic", "dynamic, in order"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    if request.param == "direct":
        return TEXT
    return dynamic(1, preserve_ordering="order" in request.param)


@pytest.fixture
def limiter() -> ExecutionLimiter:
    return ExecutionLimiter()


class Models:
    """Models of one instance each, and the executions of all of them."""

    def __init__(self, *queues: Queue) -> None:
        self.queues = queues
        self.instances: list[ScriptedInstance] = []

    def employ(self, *groups: InstanceGroup) -> None:
        for queue, each in zip(self.queues, groups, strict=True):
            self.instances.append(ScriptedInstance(1))
            queue.add(self.instances[-1], each)

    async def running(self) -> list[Execution]:
        """The executions, once nothing more happens."""
        for _ in self.instances:
            await settle()
        found = [execution for each in self.instances for execution in each.executions]
        return [each for each in found if not each.stopped.is_set()]

    async def finish_one(self) -> str:
        """End the only execution there is, and say what it was asked."""
        (execution,) = await self.running()
        finish(execution)
        await soon(execution.stopped.wait())
        return "".join(asked(execution))


@pytest.fixture
async def two(start: Start, config: ModelConfig, limiter: ExecutionLimiter) -> Models:
    return Models(start(config, limiter), start(config, limiter))


async def test_executions_with_the_same_resource_are_sequential(two: Models) -> None:
    two.employ(group(), group())
    entries = [queue.submit(text) for queue, text in zip(two.queues, "ab", strict=True)]
    assert [await two.finish_one(), await two.finish_one()] == ["a", "b"]
    assert [await soon(read_all(entry.stream)) for (entry,) in entries] == [["a"], ["b"]]


async def test_executions_with_other_resources_or_none_are_concurrent(
    start: Start, config: ModelConfig, limiter: ExecutionLimiter
) -> None:
    models = Models(*(start(config, limiter) for _ in range(3)))
    models.employ(group(), group(name="S"), InstanceGroup())
    for queue in models.queues:
        queue.submit("x")
    running = await models.running()
    assert len(running) == 3
    for execution in running:
        finish(execution)


async def test_without_needs_every_instance_executes_at_once(
    start: Start, config: ModelConfig, limiter: ExecutionLimiter
) -> None:
    queue = start(config, limiter)
    instances = [queue.employ() for _ in range(2)]
    queue.submit("a", "b", "c")
    assert [asked(await instance.begun()) for instance in instances] == [["a"], ["b"]]
    finish(instances[0].executions[0])
    assert asked(await instances[0].begun()) == ["c"]
    for instance in instances:
        finish(instance.executions[-1])


async def test_turns_are_shared_evenly_among_models(two: Models) -> None:
    two.employ(group(), group())
    two.queues[0].submit(*"abcd")
    two.queues[1].submit(*"1234")
    assert [await two.finish_one() for _ in range(8)] == list("a1b2c3d4")


async def test_a_priority_of_two_has_half_the_turns(two: Models) -> None:
    two.employ(group(priority=2), group(priority=1))
    two.queues[0].submit(*"abc")
    two.queues[1].submit(*"123456")
    found = "".join([await two.finish_one() for _ in range(9)])
    assert found.replace("a", "").replace("b", "").replace("c", "") == "123456"
    assert [sum(each.isalpha() for each in found[:count]) for count in (3, 6, 9)] == [1, 2, 3]


async def test_an_execution_with_large_needs_is_not_starved(
    start: Start, config: ModelConfig
) -> None:
    limiter = ExecutionLimiter([ResourceLimit("R", 2)])
    models = Models(*(start(config, limiter) for _ in range(3)))
    models.employ(group(1), group(1), group(2))
    models.queues[0].submit(*"aaa")
    models.queues[1].submit(*"bbb")
    first, second = await models.running()
    models.queues[2].submit("much")
    finish(first)
    assert await models.running() == [second]
    finish(second)
    assert await models.finish_one() == "much"
    for _ in range(2):
        for execution in await models.running():
            finish(execution)
    assert await models.running() == []


async def test_the_instances_of_one_model_are_limited_too(
    start: Start, config: ModelConfig
) -> None:
    limiter = ExecutionLimiter([ResourceLimit("R", 2)])
    queue = start(config, limiter)
    models = Models(queue, queue, queue)
    models.employ(group(), group(), group())
    queue.submit(*"abcd")
    assert [asked(each) for each in await models.running()] == [["a"], ["b"]]
    while running := await models.running():
        assert len(running) <= 2
        finish(running[0])
    assert sorted("".join(each.asked) for each in models.instances)[-1] != ""
    assert sum(len(each.executions) for each in models.instances) == 4


async def test_each_execution_of_an_engine_that_batches_in_flight_holds_its_resources(
    start: Start,
) -> None:
    queue = start(TEXT, ExecutionLimiter([ResourceLimit("R", 3)]))
    instance = ScriptedInstance(concurrency=None)
    queue.add(instance, group())
    queue.submit(*"abcde")
    await settle()
    assert instance.asked == list("abc")
    for _ in range(5):
        finish(await instance.begun())


# Disconnects.


async def test_a_cancelled_request_does_not_block_the_limiter(
    start: Start, config: ModelConfig
) -> None:
    limiter = ExecutionLimiter([ResourceLimit("R", 2)])
    models = Models(*(start(config, limiter) for _ in range(3)))
    models.employ(group(1), group(2), group(1))
    models.queues[0].submit("holds")
    (holding,) = await models.running()
    (entry,) = models.queues[1].submit("much")
    models.queues[2].submit("little", "more")
    finish_little = models.instances[2]
    if await models.running() != [holding]:  # it had its turn before the other asked
        finish(finish_little.executions[-1])
    assert await models.running() == [holding]
    entry.stream.cancel()
    assert len(await models.running()) == 2
    while running := await models.running():
        finish(running[-1])
    assert models.instances[1].executions == []


async def test_cancelling_an_execution_starts_the_next(two: Models) -> None:
    two.employ(group(), group())
    (first,) = two.queues[0].submit("a")
    await two.running()
    two.queues[1].submit("b")
    await settle()
    first.stream.cancel()
    assert await two.finish_one() == "b"


@pytest.mark.parametrize("error", [BROKEN, RuntimeError("slipped through")])
async def test_a_failure_lets_the_next_one_go(two: Models, error: Exception) -> None:
    two.employ(group(), group())
    (first,) = two.queues[0].submit("a")
    two.queues[1].submit("b")
    (execution,) = await two.running()
    execution.crash(error)
    with pytest.raises(InferenceError):
        await soon(read_all(first.stream))
    assert await two.finish_one() == "b"


async def test_the_death_of_an_instance_lets_the_next_one_go(two: Models) -> None:
    two.employ(group(), group())
    two.queues[0].submit("a", "waits")
    two.queues[1].submit("b")
    await two.running()
    two.queues[0].scheduler.remove(two.instances[0], BROKEN)
    assert await two.finish_one() == "b"
    two.employ(group(), InstanceGroup())  # a replacement
    assert await two.finish_one() == "waits"


async def test_withdrawing_an_instance_waits_for_its_executions(two: Models) -> None:
    two.employ(group(), group())
    two.queues[0].submit("a")
    (execution,) = await two.running()
    two.queues[1].submit("b")
    withdrawn = asyncio.ensure_future(two.queues[0].scheduler.remove(two.instances[0]))
    await settle()
    assert not withdrawn.done()
    finish(execution)
    await soon(withdrawn)
    assert await two.finish_one() == "b"


async def test_the_end_of_a_model_lets_the_others_go(two: Models) -> None:
    two.employ(group(), group())
    first, second = (queue.submit("x") for queue in two.queues)
    await two.running()
    assert two.instances[0].executions
    await two.queues[0].stop()
    assert await two.finish_one() == "x"
    assert await soon(read_all(second[0].stream)) == ["x"]
    with pytest.raises(InferenceError):
        await soon(read_all(first[0].stream))


# What there is.


async def test_available_resources_follow_the_loaded_instances(
    start: Start, config: ModelConfig, limiter: ExecutionLimiter
) -> None:
    large = limiter.register(group(3), 0)
    queue = start(config, limiter)
    models = Models(queue, queue, queue)
    models.employ(group(), group(), group())
    queue.submit(*"abcdef")
    running = await models.running()
    assert len(running) == 3
    large.unregister()
    large.unregister()
    for execution in running[:2]:
        finish(execution)
    assert await models.running() == running[2:]
    for _ in range(4):
        await models.finish_one()


async def test_devices_have_resources_of_their_own(
    start: Start, config: ModelConfig, limiter: ExecutionLimiter
) -> None:
    queues = [start(config, limiter) for _ in range(2)]
    instances = [ScriptedInstance(1) for _ in range(2)]
    for device, (queue, instance) in enumerate(zip(queues, instances, strict=True)):
        queue.scheduler.add(instance, limiter.register(group(), device))
        queue.submit("x")
    for instance in instances:
        finish(await instance.begun())


async def test_a_refused_registration_changes_nothing(limiter: ExecutionLimiter) -> None:
    limiter.register(group(2), 0)
    shared = Resource(name="R", count=9, global_=True)
    for _ in range(2):
        with pytest.raises(InferenceError, match="present as both global and device-specific"):
            limiter.register(InstanceGroup(rate_limiter=RateLimiter(resources=(shared,))), 0)
    limiter.register(group(1), 0)


async def test_a_batch_is_formed_in_its_turn(start: Start, limiter: ExecutionLimiter) -> None:
    holder = start(TEXT, limiter)
    batched = start(dynamic(8), limiter)
    models = Models(holder, batched)
    models.employ(group(), group())
    holder.submit("holds")
    await models.running()
    batched.submit("a")
    await settle()
    batched.submit("b", "c")
    assert await models.finish_one() == "holds"
    (batch,) = await models.running()
    assert asked(batch) == ["a", "b", "c"]
    finish(batch)


async def test_a_model_that_waits_for_more_requests_passes_its_turn(
    start: Start, limiter: ExecutionLimiter
) -> None:
    delay = {"max_queue_delay_microseconds": 60_000_000, "preferred_batch_size": (2,)}
    patient = start(dynamic(2, **delay), limiter)
    models = Models(start(TEXT, limiter), patient)
    models.employ(group(), group())
    patient.submit("a")
    models.queues[0].submit("x")
    assert await models.finish_one() == "x"
    patient.submit("b")
    (batch,) = await models.running()
    assert asked(batch) == ["a", "b"]
    finish(batch)


async def test_priorities_of_zero_and_one_are_the_same() -> None:
    limiter = ExecutionLimiter()
    shares = [limiter.register(replace(group(priority=priority)), 0) for priority in (0, 1, 2)]
    for share in shares:
        share.limiter.began(share)
    assert [share.claim.score for share in shares] == [1, 1, 2]
