"""Parts of a connection behave as those of asyncio and uvicorn."""

import asyncio
from typing import cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.frontends.http.connection_parts import DroppedRest, Flow, Pipeline, Signal
from tests.builders import settle, soon


@pytest.mark.parametrize("kind", [asyncio.Event, Signal])
async def test_a_signal_wakes_all_waiting_tasks(kind: type[asyncio.Event | Signal]) -> None:
    signal = kind()
    first, second, third = [asyncio.create_task(signal.wait()) for _ in range(3)]
    await settle()
    second.cancel()
    await settle()
    assert not any(task.done() for task in (first, third))
    signal.set()
    await soon(asyncio.gather(first, third))
    await soon(signal.wait())
    signal.clear()
    again = asyncio.create_task(signal.wait())
    await settle()
    assert not again.done()
    signal.set()
    await soon(again)


class Transport:
    """The calls that a transport got."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


@pytest.mark.parametrize("kind", [FlowControl, Flow])
async def test_a_flow_pauses_as_uvicorns(kind: type[FlowControl | Flow]) -> None:
    transport = Transport()
    flow = kind(cast(asyncio.Transport, transport))
    for act in (flow.resume_reading, flow.pause_reading, flow.pause_reading):
        act()
    assert (transport.calls, flow.read_paused) == (["pause"], True)
    flow.resume_reading()
    assert (transport.calls, flow.read_paused) == (["pause", "resume"], False)
    await soon(flow.drain())
    flow.pause_writing()
    waiting = [asyncio.create_task(flow.drain()) for _ in range(2)]
    await settle()
    assert flow.write_paused
    assert not any(task.done() for task in waiting)
    flow.resume_writing()
    await soon(asyncio.gather(*waiting))
    assert not flow.write_paused


def test_a_pipeline_keeps_the_order_of_requests() -> None:
    pipeline = Pipeline()
    for request in ("first", "second"):
        pipeline.appendleft(request)
    assert [len(pipeline), pipeline.pop(), pipeline.pop(), len(pipeline)] == [
        2,
        "first",
        "second",
        0,
    ]


class LingeringTransport:
    """The calls of the end of a connection, with TLS or without."""

    def __init__(self, *, has_eof: bool) -> None:
        self.calls: list[object] = []
        self._has_eof = has_eof

    def can_write_eof(self) -> bool:
        return self._has_eof

    def write_eof(self) -> None:
        self.calls.append("end")

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self.calls.append(protocol)

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("has_eof", [True, False])
async def test_the_rest_behind_a_last_response_is_dropped_for_a_time(
    monkeypatch: pytest.MonkeyPatch, *, has_eof: bool
) -> None:
    monkeypatch.setattr("gateway.frontends.http.connection_parts.LINGER_SECS", 0.01)
    transport, before = LingeringTransport(has_eof=has_eof), Lost()
    dropped = DroppedRest(cast(asyncio.Transport, transport), before)
    dropped.data_received(b"more")
    assert transport.calls == [*(["end"] if has_eof else []), dropped]
    await asyncio.sleep(0.05)
    assert transport.calls[-1] == "close"
    dropped.connection_lost(None)
    assert before.ends == 1


async def test_no_more_than_a_number_of_bytes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.frontends.http.connection_parts.LINGER_BYTES", 10)
    transport, before = LingeringTransport(has_eof=True), Lost()
    dropped = DroppedRest(cast(asyncio.Transport, transport), before)
    dropped.data_received(b"12345")
    dropped.data_received(b"67890")
    assert "close" not in transport.calls
    dropped.data_received(b"1")
    assert transport.calls[-1] == "close"
    dropped.connection_lost(None)


async def test_a_client_that_closes_its_end_leaves_no_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.frontends.http.connection_parts.LINGER_SECS", 0.01)
    transport, before = LingeringTransport(has_eof=True), Lost()
    DroppedRest(cast(asyncio.Transport, transport), before).connection_lost(None)
    await asyncio.sleep(0.05)
    assert "close" not in transport.calls
    assert before.ends == 1


class Lost(asyncio.Protocol):
    """The number of its ends."""

    ends = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends += 1
