"""Disconnects: the model sees them, and calls made for the client end."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from backends.python import execution, executions
from gateway.backend import Instance
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.stream import ResponseStream
from tests.backends.python.loading import (
    CONFIG,
    DECOUPLED,
    Load,
    Others,
    answers,
    request,
    soon,
    values,
)
from tests.builders import settle
from tests.serving import wait_until

ASKING = """
    def execute(self, requests):
        found = [self.ask(each) for each in requests]
        (HERE / "told").write_text(" | ".join(found))
        return [response(x(each)) for each in requests]

    def ask(self, request):
        found = pb_utils.InferenceRequest(
            model_name="other", requested_output_names=["y"], inputs=request.inputs(),
            trace=request.trace(),
        ).exec()
        return found.error().message() if found.has_error() else "answered"
"""


def cancellable(*values: float) -> tuple[InferRequest, ResponseStream]:
    """A request as it is during its execution, and its stream."""
    stream = ResponseStream()
    return request(*values, cancellation=stream), stream


def begin(instance: Instance, *requests: InferRequest) -> "asyncio.Task[object]":
    """Execute requests until the task is cancelled, as after a disconnect of all readers."""

    async def run() -> None:
        async for _ in instance.execute(requests):
            """The answers are not used."""

    return asyncio.ensure_future(run())


async def test_calls_of_a_model_end_with_their_client(load: Load, tmp_path: Path) -> None:
    others = Others()
    instance = await load(ASKING, infer=others.infer, control=others)
    executing = begin(instance, request(1), request(2))
    await soon(others.asked.wait())
    executing.cancel()
    await soon(asyncio.wait([executing]))
    assert others.streams[0].cancelled
    # What it would ask after that is not even begun.
    told = (tmp_path / "m" / "1" / "told").read_text()
    assert told == "Request was cancelled | Request was cancelled"
    assert len(others.streams) == 1


async def test_a_call_for_several_requests_continues_until_all_have_disconnected(
    load: Load,
) -> None:
    others = Others()
    instance = await load(ASKING, infer=others.infer, control=others)
    (first, first_stream), (second, second_stream) = cancellable(1), cancellable(2)
    executing = begin(instance, first, second)
    await soon(others.asked.wait())
    first_stream.cancel()
    await settle()
    assert not others.streams[0].cancelled
    second_stream.cancel()
    assert others.streams[0].cancelled
    executing.cancel()
    await soon(asyncio.wait([executing]))


async def test_calls_of_a_model_are_part_of_the_trace(load: Load) -> None:
    class Traced:
        headers: ClassVar[Mapping[str, str]] = {}

        def child(self) -> "Traced":
            return self

    others, trace = Others(), Traced()
    instance = await load(ASKING, infer=others.infer, control=others)
    asking = asyncio.ensure_future(answers(instance, request(1, trace=trace)))
    await soon(others.asked.wait())
    assert others.requests[0].trace is trace
    others.streams[0].put(InferResponse(final=True))
    await soon(asking)


async def test_an_iterator_ends_once_it_is_cancelled(load: Load, tmp_path: Path) -> None:
    others = Others(decoupled=True)
    code = """
    def execute(self, requests):
        found = pb_utils.InferenceRequest(
            model_name="other", requested_output_names=["y"], inputs=requests[0].inputs()
        ).exec(decoupled=True)
        next(found)
        found.cancel()
        rest = [each.error().message() for each in found if each.has_error()]
        return [response(x(requests[0]), parameters={"told": repr(rest)})]
"""
    instance = await load(code, infer=others.infer, control=others)
    asking = asyncio.ensure_future(answers(instance, request(1)))
    await soon(others.asked.wait())
    others.streams[0].put(InferResponse(outputs=request(1).inputs))
    ((_, found),) = await soon(asking)
    assert isinstance(found, InferResponse)
    assert found.parameters == {"told": "['Request was cancelled']"}
    assert others.streams[0].cancelled


BATCH = """
    def execute(self, requests):
        (HERE / "begun").touch()
        first, second = requests
        deadline = time.monotonic() + 20
        while not first.is_cancelled() and time.monotonic() < deadline:
            time.sleep(0.005)
        told = [first.is_cancelled(), second.is_cancelled()]
        return [response(np.array(told, np.float32)) for each in requests]
"""


async def test_a_disconnect_in_a_batch_is_seen_by_the_model(load: Load, tmp_path: Path) -> None:
    instance = await load(BATCH)
    first, stream = cancellable(1)
    executing = asyncio.ensure_future(answers(instance, first, request(1)))
    begun = (tmp_path / "m" / "1" / "begun").exists
    await asyncio.to_thread(wait_until, begun, "execute has begun")
    stream.cancel()
    ((index, found),) = await soon(executing)
    assert (index, values((index, found))) == (1, [1, 0])


async def test_an_abandoned_execution_behind_another_does_not_end_the_worker(
    load: Load, tmp_path: Path
) -> None:
    config = replace(CONFIG, parameters={"abandoned_execute_secs": "0.2"})
    code = """
    def execute(self, requests):
        time.sleep(float(x(requests[0])[0]))
        return [response(x(each)) for each in requests]
"""
    instance = await load(code, config)
    for _ in range(20):
        await answers(instance, request(0))
    slow = asyncio.ensure_future(answers(instance, request(1)))
    await settle()
    behind = begin(instance, request(0))
    await settle()
    behind.cancel()
    *_, served = await soon(slow)
    assert values(served) == [1]


class Writing:
    """Large tensors, which are written once a test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        monkeypatch.setattr(executions, "MUCH_BYTES", 0)
        monkeypatch.setattr(executions, "write_in_thread", self._write)

    async def _write(self, write: Callable[[], object], tensors: object) -> object:
        self.has_begun.set()
        await self.may_end.wait()
        return write()


async def test_a_disconnect_while_tensors_are_written_is_seen_by_the_model(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await load(BATCH)
    writing, (first, stream) = Writing(monkeypatch), cancellable(1)
    executing = asyncio.ensure_future(answers(instance, first, request(1)))
    await soon(writing.has_begun.wait())
    stream.cancel()
    writing.may_end.set()
    ((index, found),) = await soon(executing)
    assert (index, values((index, found))) == (1, [1, 0])


async def test_one_that_is_stopped_while_its_tensors_are_written_is_answered(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await load(BATCH)
    writing, (first, stream) = Writing(monkeypatch), cancellable(1)
    executing = asyncio.ensure_future(answers(instance, first, request(1)))
    await soon(writing.has_begun.wait())
    stream.stop()
    assert not stream.done, "the model answers it"
    writing.may_end.set()
    found = await soon(executing)
    assert [values(each) for each in found] == [[1, 0], [1, 0]]


async def test_a_later_one_is_cancelled_though_a_large_one_is_written_first(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
    def execute(self, requests):
        deadline = time.monotonic() + 20
        while x(requests[0])[0] and not requests[0].is_cancelled() and time.monotonic() < deadline:
            time.sleep(0.005)
        return [response(np.array([each.is_cancelled()], np.float32)) for each in requests]
"""
    instance = await load(code)
    with monkeypatch.context() as patched:
        writing, (large, stream) = Writing(patched), cancellable(1)
        executing = asyncio.ensure_future(answers(instance, large))
        await soon(writing.has_begun.wait())
    assert [values(each) for each in await answers(instance, request(0))] == [[0]]
    stream.stop()
    writing.may_end.set()
    assert [values(each) for each in await soon(executing)] == [[1]]


SUSPECTS = """
    def execute(self, requests):
        (HERE / "begun").touch()
        if x(requests[0])[0] == 13 and not (HERE / "died").exists():
            (HERE / "died").touch()
            os._exit(3)
        while x(requests[0])[0] == 1 and not (HERE / "go").exists():
            time.sleep(0.005)
        first, ends_at = requests[0], time.monotonic() + 10
        while x(first)[0] == 13 and not first.is_cancelled() and time.monotonic() < ends_at:
            time.sleep(0.005)
        (HERE / "executed").write_text(str([float(x(each)[0]) for each in requests]))
        return [response(np.array([each.is_cancelled()], np.float32)) for each in requests]
"""


@pytest.mark.parametrize("how", ["left", "stopped"])
async def test_a_suspect_whose_turn_has_not_come_is_cancelled(
    load: Load, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "m" / "1"
    first = await load(SUSPECTS)
    ((_, error),) = await answers(first, request(13))
    assert isinstance(error, InferenceError)
    (folder / "begun").unlink()
    instance = await load(SUSPECTS)
    other, (suspect, stream) = request(1), cancellable(13)
    executing = asyncio.ensure_future(answers(instance, other, suspect))
    await asyncio.to_thread(wait_until, (folder / "begun").exists, "execute has begun")
    if how == "left":
        stream.cancel()
    else:
        stream.stop()
    (folder / "go").touch()
    found = [values(each) for each in await soon(executing)]
    assert found == ([[0]] if how == "left" else [[0], [1]])
    executed = (folder / "executed").read_text()
    assert executed == ("[1.0]" if how == "left" else "[13.0]")


STREAMS = """
    def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        threading.Thread(target=self.send, args=(sender, int(x(request)[0]))).start()

    def send(self, sender, count):
        for number in range(count):
            (HERE / "sent").write_text(str(number))
            sender.send(response(np.full(30_000, number, np.float32)))
        sender.send(flags=FINAL)
"""


PACED = STREAMS.replace("sender.send(r", "time.sleep(0.005); sender.send(r").replace("30_000", "10")


async def test_many_readers_that_stop_leave_room_for_another(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "HOLD_BYTES", 4 << 20)
    monkeypatch.setattr(execution, "HELD_BYTES", 64 << 20)
    instance = await load(PACED, DECOUPLED)
    stopped = [instance.execute([request(100)]) for _ in range(24)]
    for each in stopped:
        await soon(anext(each))
    for _ in range(4):
        assert len(await soon(answers(instance, request(100)))) == 101
    for each in stopped:
        await each.aclose()


async def test_a_slow_reader_holds_back_its_own_request_and_no_other(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "HOLD_BYTES", 1 << 20)
    monkeypatch.setattr(execution, "HELD_BYTES", 16 << 20)
    instance = await load(STREAMS, DECOUPLED)
    slow = instance.execute([request(300)])
    await soon(anext(slow))
    for _ in range(15):
        assert len(await answers(instance, request(20))) == 21
    assert len([answer async for answer in slow]) >= 300
