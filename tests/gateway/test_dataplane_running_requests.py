"""Ids of running requests."""

import gc

import pytest

from gateway.dataplane import RequestName, RunningRequests
from gateway.stream import ResponseStream


def test_a_stream_is_found_by_model_and_id() -> None:
    running, stream, other = RunningRequests(), ResponseStream(), ResponseStream()
    running.add(stream, RequestName("m", "1", "a"))
    running.add(other, RequestName("m", "1", "b"))
    assert running.streams(RequestName("m", "", "a")) == [stream]


@pytest.mark.parametrize(("version", "found"), [("", 2), ("1", 1), ("2", 1), ("3", 0)])
def test_without_a_version_it_is_any(version: str, found: int) -> None:
    running, streams = RunningRequests(), [ResponseStream(), ResponseStream()]
    for number, stream in enumerate(streams, 1):
        running.add(stream, RequestName("m", str(number), "a"))
    assert len(running.streams(RequestName("m", version, "a"))) == found


@pytest.mark.parametrize("name", [RequestName("m", "", "b"), RequestName("n", "", "a")])
def test_other_ids_and_other_models_are_others(name: RequestName) -> None:
    running, stream = RunningRequests(), ResponseStream()
    running.add(stream, RequestName("m", "1", "a"))
    assert running.streams(name) == []


def test_requests_may_share_an_id() -> None:
    running, streams = RunningRequests(), [ResponseStream() for _ in range(3)]
    for stream in streams:
        running.add(stream, RequestName("m", "1", "a"))
    assert running.streams(RequestName("m", "", "a")) == streams


def test_a_collected_stream_is_dropped() -> None:
    running = RunningRequests()
    streams = [ResponseStream() for _ in range(100)]
    for stream in streams:
        running.add(stream, RequestName("m", "1", "a"))
    assert len(running) == 100
    del stream, streams
    gc.collect()
    assert len(running) == 0
    assert running.streams(RequestName("m", "", "a")) == []
