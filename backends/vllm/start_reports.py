"""Reports of an engine's processes while they start: their errors, and the stages with their times.

This module imports nothing of vLLM: a process reports before it has imported vLLM. The times of
stages are in vLLM's log only; `tests/e2e/test_start_stages.py` compares its words with STAGES.
"""

import asyncio
import logging
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, Self

log = logging.getLogger("sluice.vllm")

MAX_REASON = 500
MAX_MESSAGE_BYTES = 4000
"""Below PIPE_BUF, so that messages of several processes do not interleave."""

ERROR, STAGE = "error", "stage"
"""Kinds of reports."""

STARTED = "process started"
"""The stage from a process's creation to vLLM's plugins, most of it the import of vLLM."""


class LoggedStage(NamedTuple):
    """A line of vLLM's log that ends a stage, with the seconds that it took."""

    line: re.Pattern[str]
    stage: str


def _stage(line: str, stage: str) -> LoggedStage:
    return LoggedStage(re.compile(line), stage)


SECS = r"([\d.]+) s"
GRAPHS = (_stage(rf"Graph capturing finished in {SECS}", "CUDA graphs captured"),)
STAGES: Mapping[str, Sequence[LoggedStage]] = {
    "vllm.v1.engine.core": (
        _stage(rf"init engine .* took {SECS}", "cache made and engine warmed up"),
    ),
    "vllm.model_executor.model_loader.default_loader": (
        _stage(rf"Loading weights took {SECS}", "weights loaded"),
    ),
    "vllm.compilation.monitor": (_stage(rf"torch.compile took {SECS}", "model compiled"),),
    # vLLM has two runners, and chooses by the model and the device.
    "vllm.v1.worker.gpu_model_runner": GRAPHS,
    "vllm.v1.worker.gpu.model_runner": GRAPHS,
}
"""The stages by the logger of vLLM that logs their ends."""


class StartReporter:
    """Sends the reports of this process; an argument of new processes."""

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        # Descriptors are passed only to spawned processes: vLLM also pickles its settings itself.
        if self._connection is None or get_spawning_popen() is None:
            return StartReporter, (None,)
        return _arrived, (DupFd(self._connection.fileno()),)

    def close(self) -> None:
        """Stop sending."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def watch_log(self) -> None:
        """Send each exception logged as an error, and each stage, as one line from now on."""
        if (connection := self._connection) is None:
            return
        _reporting.append(connection)
        make = logging.getLogRecordFactory()

        # vLLM reconfigures its loggers while it starts, but not the factory of records.
        def record(*values: Any, **named: Any) -> logging.LogRecord:
            made = make(*values, **named)
            if made.levelno >= logging.ERROR and made.exc_info and made.exc_info[1]:
                _send(connection, ERROR, one_line(made.exc_info[1]))
            return made

        logging.setLogRecordFactory(record)


_reporting: list[Connection] = []
"""The connection of this process, once it watches its log."""


def report_stages() -> None:
    """Send the stages of this process's start from now on, the first one at once.

    vLLM calls it in each of its processes, after it has configured its loggers: it is an entry
    point of the group `vllm.general_plugins`. In other processes it has no effect.
    """
    while _reporting:
        connection = _reporting.pop()
        _send(connection, STAGE, f"{STARTED}\n{_process_age():.1f}")
        for name, stages in STAGES.items():
            logger = logging.getLogger(name)
            logger.setLevel(logging.INFO)
            logger.addFilter(_StageFilter(connection, stages))


class _StageFilter(logging.Filter):
    """Sends the stages that a logger of vLLM logs; passes on what vLLM's log level passes."""

    def __init__(self, connection: Connection, stages: Sequence[LoggedStage]) -> None:
        super().__init__()
        self._connection = connection
        self._stages = stages

    def filter(self, record: logging.LogRecord) -> bool:
        for each in self._stages:
            if found := each.line.search(record.getMessage()):
                _send(self._connection, STAGE, f"{each.stage}\n{float(found[1]):.1f}")
        return logging.getLogger("vllm").isEnabledFor(record.levelno)


def _process_age() -> float:
    """Seconds since this process was created."""
    # Imported here: a requirement of vLLM, not of Sluice.
    import psutil

    return time.time() - float(psutil.Process().create_time())


def one_line(error: BaseException) -> str:
    """The type and the text of an error, without the advice that Torch appends."""
    text = " ".join(str(error).strip().partition("\n\n")[0].split())
    text = text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _arrived(descriptor: Any) -> StartReporter:
    return StartReporter(Connection(descriptor.detach(), readable=False))


def _send(connection: Connection, kind: str, text: str) -> None:
    process = multiprocessing.current_process().name
    message = f"{process}\n{kind}\n{text}".encode()[:MAX_MESSAGE_BYTES]
    with suppress(OSError):  # the load has ended, or the pipe is full
        connection.send_bytes(message)


class Report(NamedTuple):
    """A report of a process: of the kind ERROR or STAGE."""

    process: str
    kind: str
    text: str


class StartReports:
    """The reading end, inside `with` on the event loop; logs each stage as soon as it arrives.

    `reporter` is passed to each process of the engine. `errors` are the errors so far, in order.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._reader, writer = multiprocessing.Pipe(duplex=False)
        # If the pipe is full, further messages are dropped; the process does not block.
        os.set_blocking(writer.fileno(), False)
        self.reporter = StartReporter(writer)
        self.errors: list[Report] = []

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader.fileno(), self.read)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._reader.fileno())
        self.read()
        self.reporter.close()
        self._reader.close()

    def read(self) -> None:
        """Read the reports that have arrived."""
        for report in self._received():
            if report.kind == STAGE:
                stage, _, secs = report.text.partition("\n")
                fields = {"model": self._model, "of": report.process, "secs": float(secs)}
                log.info(stage, extra=fields)
            else:
                self.errors.append(report)

    def _received(self) -> Iterator[Report]:
        while self._reader.poll():
            process, kind, text = self._reader.recv_bytes().decode(errors="replace").split("\n", 2)
            yield Report(process, kind, text)
