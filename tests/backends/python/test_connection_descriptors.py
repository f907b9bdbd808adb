"""A process with few descriptors: unread tensors take none, and messages wait for a free one."""

import asyncio
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backends.python import connection
from gateway.messages import InferResponse
from tests.backends.python.loading import DECOUPLED, Load, answers, request, soon, values

LARGE = """
    def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        threading.Thread(target=self.send, args=(sender, int(x(request)[0]))).start()

    def send(self, sender, count):
        for number in range(count):
            sender.send(response(np.full(20_000, number, np.float32)))
        sender.send(flags=FINAL)
"""


def open_descriptors() -> int:
    """The number that this process has."""
    return len(os.listdir("/proc/self/fd")) - 1


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process may open no more files, inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each) for each in os.listdir("/proc/self/fd"))
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


async def test_unread_tensors_take_no_descriptors(load: Load) -> None:
    instance = await load(LARGE, DECOUPLED)
    before = open_descriptors()
    readers = [instance.execute([request(40)]) for _ in range(30)]
    for reader in readers:
        await soon(anext(reader))
    kept = [await soon(anext(reader)) for reader in readers for _ in range(20)]
    assert len(kept) == 600
    assert open_descriptors() <= before + 2
    for reader in readers:
        await soon(reader.aclose())
    assert len(await answers(instance, request(3))) == 4


async def test_a_response_waits_for_a_descriptor(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "RETRY_SECS", 0.01)
    instance = await load(LARGE, DECOUPLED)
    assert len(await answers(instance, request(1))) == 2
    gc.collect()
    reading = instance.execute([request(5)])
    with no_descriptor_left():
        asking = asyncio.ensure_future(collect(reading))
        other = asyncio.ensure_future(answers(instance, request(0)))
        await asyncio.wait([asking, other], timeout=0.3)
        assert not asking.done()
        assert not instance_died(caplog)
    found = await soon(asking)
    assert [values(each)[0] for each in found if is_data(each)] == list(range(5))
    await soon(other)
    assert len(await answers(instance, request(2))) == 3
    assert not instance_died(caplog)


async def test_a_batch_of_large_tensors_waits_whole(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RETRY_SECS", 0.01)
    code = """
    def execute(self, requests):
        return [response(np.full(20_000, x(each)[0], np.float32)) for each in requests]
"""
    instance = await load(code)
    ((_, first),) = await answers(instance, request(7))  # one segment is mapped, others are not
    del first
    gc.collect()
    with no_descriptor_left():
        asking = asyncio.ensure_future(answers(instance, *[request(each) for each in range(6)]))
        await asyncio.wait([asking], timeout=0.3)
        assert not asking.done()
    found = await soon(asking)
    assert [(index, values((index, each))[0]) for index, each in found] == [
        (each, each) for each in range(6)
    ]
    del found
    gc.collect()
    for round_ in range(3):  # each segment was released once, and serves again
        again = await answers(instance, *[request(round_ + each) for each in range(6)])
        assert [values(each)[0] for each in again] == [round_ + each for each in range(6)]


async def test_a_response_that_waits_for_a_descriptor_outlives_its_worker(load: Load) -> None:
    code = """
    def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        if x(request)[0]:
            sender.send(response(np.full(20_000, 1, np.float32)), flags=FINAL)
            time.sleep(0.2)
            os._exit(3)
        sender.send(response(x(request)), flags=FINAL)
"""
    instance = await load(code, DECOUPLED)
    await answers(instance, request(0))
    gc.collect()
    with no_descriptor_left():
        found = await answers(instance, request(1))
    assert [len(values(each)) for each in found] == [20_000]


async def collect(reading: object) -> list[object]:
    return [answer async for answer in reading]  # type: ignore[attr-defined]


def is_data(answer: object) -> bool:
    _, found = answer  # type: ignore[misc]
    return isinstance(found, InferResponse) and bool(found.outputs)


def instance_died(caplog: pytest.LogCaptureFixture) -> bool:
    return any("not understood" in each.getMessage() for each in caplog.records)
