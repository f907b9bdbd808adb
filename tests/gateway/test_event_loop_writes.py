"""Batches of writes of connections."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import cast

from gateway.event_loop import WRITES


class Transport:
    """Notes in `log` what is written, and closes after `closes_after`."""

    def __init__(
        self, name: str, log: list[str], closes_after: str = "", *, fails: bool = False
    ) -> None:
        self._name = name
        self._fails = fails
        self._log = log
        self._closes_after = closes_after

    def is_closing(self) -> bool:
        return bool(self._closes_after) and self._closes_after in self._log

    def abort(self) -> None:
        self._log.append(f"{self._name} aborted")

    def write(self, data: bytes) -> None:
        if self._fails:
            raise MemoryError
        self._log.append(f"{self._name} {data.decode()}")

    def put(self, data: bytes) -> None:
        """Add a write to the batch, as a connection does."""
        assert WRITES.collected is not None
        WRITES.collected.append((cast("asyncio.WriteTransport", self), data))


def test_writes_of_a_batch_are_made_in_order_at_its_end() -> None:
    log: list[str] = []
    first, second = Transport("a", log), Transport("b", log)
    with WRITES:
        first.put(b"1")
        second.put(b"2")
        first.put(b"3")
        assert log == []
    assert log == ["a 1", "b 2", "a 3"]
    assert WRITES.collected is None


def test_an_error_loses_no_write_before_it() -> None:
    log: list[str] = []
    with suppress(ValueError), WRITES:
        Transport("a", log).put(b"1")
        raise ValueError
    assert log == ["a 1"]
    with WRITES:
        pass
    assert log == ["a 1"]


def test_nothing_is_written_to_a_transport_that_closes_meanwhile() -> None:
    log: list[str] = []
    first, second = Transport("a", log), Transport("b", log, closes_after="a 1")
    with WRITES:
        first.put(b"1")
        second.put(b"2")
        first.put(b"3")
    assert log == ["a 1", "a 3"]


def test_a_write_that_fails_drops_its_connection_only() -> None:
    log: list[str] = []
    with WRITES:
        Transport("a", log, fails=True).put(b"1")
        Transport("b", log).put(b"2")
    assert log == ["a aborted", "b 2"]


def test_another_thread_has_a_batch_of_its_own() -> None:
    with WRITES, ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: WRITES.collected).result() is None


def test_a_batch_inside_another_one_leaves_the_writes_to_that() -> None:
    log: list[str] = []
    with WRITES:
        Transport("a", log).put(b"1")
        with suppress(ValueError), WRITES:
            Transport("b", log).put(b"2")
            raise ValueError
        assert log == []
    assert log == ["a 1", "b 2"]
    assert WRITES.collected is None
