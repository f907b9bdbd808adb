"""Errors and stages that a process of an engine logs arrive where it was started."""

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Iterator
from copy import deepcopy
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import pytest

from backends.vllm.start_reports import (
    StartReporter,
    StartReports,
    one_line,
    report_stages,
)
from tests.builders import soon
from tests.serving import wait_until

Ends = tuple[Connection, StartReporter]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The reading end of a pipe, and a sender with the other."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    os.set_blocking(writer.fileno(), False)
    sender = StartReporter(writer)
    yield reader, sender
    sender.close()
    reader.close()


class Settings:
    """Pickled as vLLM pickles its own: by cloudpickle, while a process is started."""

    def __init__(self, sender: StartReporter) -> None:
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


def run(sender: StartReporter, count: int) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=work, args=(Settings(sender), count), name="Worker"
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_an_exception_arrives_in_one_line(ends: Ends) -> None:
    reader, sender = ends
    run(sender, 1)
    assert reader.recv_bytes() == b"Worker\nerror\nValueError: weight 0 is missing"
    assert not reader.poll()


def test_a_process_whose_errors_are_not_read_does_not_block(ends: Ends) -> None:
    reader, sender = ends
    run(sender, 3000)
    assert reader.recv_bytes() == b"Worker\nerror\nValueError: weight 0 is missing"


def test_a_closed_sender_starts_processes_that_send_nothing(ends: Ends) -> None:
    reader, sender = ends
    sender.close()
    run(sender, 1)
    with pytest.raises(EOFError):
        reader.recv_bytes()


def load(settings: Any) -> None:
    """Log what vLLM does, at its level."""
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    settings["sender"].watch_log()
    report_stages()
    report_stages()
    loader = logging.getLogger("vllm.model_executor.model_loader.default_loader")
    loader.info("Loading weights took %.2f seconds", 3.25)
    loader.info("Something else took %.2f seconds", 3.25)
    for runner, secs in (("gpu_model_runner", 12), ("gpu.model_runner", 13)):
        logging.getLogger(f"vllm.v1.worker.{runner}").info(
            "Graph capturing finished in %.0f secs, took %.2f GiB", secs, 0.5
        )


async def test_stages_are_logged_while_the_engine_starts(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "sluice.vllm")
    with StartReports("llama") as reports:
        process = multiprocessing.get_context("spawn").Process(
            target=load, args=(Settings(reports.reporter),), name="Worker"
        )
        process.start()
        await soon(asyncio.to_thread(process.join, 60))
        await soon(asyncio.to_thread(wait_until, lambda: len(caplog.records) == 4, "stages"))
    assert process.exitcode == 0
    found = [record.__dict__ for record in caplog.records]
    assert [each["msg"] for each in found] == [
        "process started",
        "weights loaded",
        "CUDA graphs captured",
        "CUDA graphs captured",
    ]
    assert {(each["model"], each["of"]) for each in found} == {("llama", "Worker")}
    assert [each["secs"] for each in found[1:]] == [3.2, 12.0, 13.0]
    assert 0 < found[0]["secs"] < 60
    assert "Something else" not in "".join(capfd.readouterr())
    assert reports.errors == []


def test_a_copy_is_the_sender_itself(ends: Ends) -> None:
    assert deepcopy({"sender": ends[1]})["sender"] is ends[1]


def test_a_long_text_is_cut() -> None:
    assert one_line(RuntimeError("x" * 1000)) == f"RuntimeError: {'x' * 500}..."
    assert one_line(RuntimeError()) == "RuntimeError"
