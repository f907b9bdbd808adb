"""Errors that a process of an engine logs arrive where it was started."""

import logging
import multiprocessing
import os
from collections.abc import Iterator
from copy import deepcopy
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import pytest

from backends.vllm.engine_processes import ErrorSender, one_line

Ends = tuple[Connection, ErrorSender]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The reading end of a pipe, and a sender with the other."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    os.set_blocking(writer.fileno(), False)
    sender = ErrorSender(writer)
    yield reader, sender
    sender.close()
    reader.close()


class Settings:
    """Pickled as vLLM pickles its own: by cloudpickle, while a process is started."""

    def __init__(self, sender: ErrorSender) -> None:
        self.sender = sender

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (cloudpickle.dumps({"sender": self.sender}),)


def work(settings: Any, count: int) -> None:
    settings["sender"].watch_log()
    logging.getLogger("vllm").warning("no error", exc_info=ValueError("only a warning"))
    logging.getLogger("vllm").error("no exception")
    for number in range(count):
        try:
            raise ValueError(f"weight {number}\nis missing\n\nRead the manual")
        except ValueError:
            logging.getLogger("vllm.worker").exception("failed")


def run(sender: ErrorSender, count: int) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=work, args=(Settings(sender), count), name="Worker"
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_an_exception_arrives_in_one_line(ends: Ends) -> None:
    reader, sender = ends
    run(sender, 1)
    assert reader.recv_bytes() == b"Worker\nValueError: weight 0 is missing"
    assert not reader.poll()


def test_a_process_whose_errors_are_not_read_does_not_block(ends: Ends) -> None:
    reader, sender = ends
    run(sender, 3000)
    assert reader.recv_bytes() == b"Worker\nValueError: weight 0 is missing"


def test_a_closed_sender_starts_processes_that_send_nothing(ends: Ends) -> None:
    reader, sender = ends
    sender.close()
    run(sender, 1)
    with pytest.raises(EOFError):
        reader.recv_bytes()


def test_a_copy_is_the_sender_itself(ends: Ends) -> None:
    assert deepcopy({"sender": ends[1]})["sender"] is ends[1]


def test_a_long_text_is_cut() -> None:
    assert one_line(RuntimeError("x" * 1000)) == f"RuntimeError: {'x' * 500}..."
    assert one_line(RuntimeError()) == "RuntimeError"
