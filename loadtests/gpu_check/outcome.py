"""Outcomes of parts: the process of each, its rows of figures, their verdict, and their table.

`main` of this module runs one part in a process of its own, with a time limit; its descendants end
with it.
"""

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from loadtests.gpu_check.parts import Asked, Part
from loadtests.support.http_client import StreamFailed
from loadtests.support.rounds import Better, LoadTestFailed
from loadtests.support.servers import LOG_TAIL, LOGS, ServerFailed

PROC = Path("/proc")
PR_SET_CHILD_SUBREAPER = 36
STOP_SECS = 20.0
"""Seconds for a part to end its servers after SIGTERM."""
KILL_SECS = 5.0
POLL_SECS = 0.02
COMMAND = (sys.executable, "-c", "from loadtests.gpu_check.outcome import main; main()")


class Status(StrEnum):
    """How a part ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Skipped(Exception):
    """A part cannot be checked on this machine; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure, by the gateway and, where there is such a thing, by the runtime alone.

    A row without a promise is `ok` with any figure; `expected` is the promise in words.
    """

    name: str
    gateway: float
    alone: float | None = None
    better: Better = Better.NEITHER
    ok: bool = True
    expected: str = ""

    @property
    def ratio(self) -> float | None:
        """The gateway's figure over the runtime's."""
        return self.gateway / self.alone if self.alone else None

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "better": self.better.value, "ratio": self.ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a part ended; `reason` says why it was skipped or failed."""

    part: str
    status: Status
    reason: str = ""
    secs: float = 0.0
    rows: Sequence[Row] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "rows": [row.as_json() for row in self.rows]}


def judged(part: str, rows: Sequence[Row], secs: float) -> Outcome:
    """The outcome of a part that ended: passed if every row is right."""
    bad = [
        f"{row.name}: found {row.gateway:g}, expected {row.expected}" for row in rows if not row.ok
    ]
    status = Status.FAILED if bad else Status.PASSED
    return Outcome(part=part, status=status, reason="; ".join(bad), secs=secs, rows=rows)


def read_outcome(told: Mapping[str, Any]) -> Outcome:
    """The outcome that a part's process wrote down."""
    rows = [
        Row(**{**row, "better": Better(row["better"])})
        for row in ({k: v for k, v in each.items() if k != "ratio"} for each in told["rows"])
    ]
    return Outcome(**{**told, "status": Status(told["status"]), "rows": rows})


COLOURS = {Status.PASSED: "green", Status.FAILED: "bold red", Status.SKIPPED: "yellow"}


def table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """A line for each part, and below it one for each figure."""
    made = Table(title=title, title_justify="left")
    made.add_column("part", overflow="fold")
    for heading in ("alone", "gateway", "ratio"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("result", overflow="fold")
    for outcome in outcomes:
        status = f"[{COLOURS[outcome.status]}]{outcome.status}[/], {outcome.secs:.0f} s"
        first, _, more = outcome.reason.partition("\n")
        reason = f": {escape(first)}{' ... (the rest is in the file)' if more else ''}"
        reason = reason if first else ""
        made.add_row(f"[bold]{outcome.part}[/]", "", "", "", f"{status}{reason}")
        for row in filter(_is_telling, outcome.rows):
            made.add_row(f"  {escape(row.name)}", *_cells(row))
        made.add_section()
    return made


def _is_telling(row: Row) -> bool:
    """Whether a row is shown; one without a verdict is in the file only."""
    return row.expected != "" or row.better is not Better.NEITHER


def _cells(row: Row) -> Iterator[str]:
    yield "" if row.alone is None else _number(row.alone)
    yield _number(row.gateway)
    yield _ratio(row)
    if row.expected:
        yield f"{'[green]ok[/]' if row.ok else '[bold red]wrong[/]'}: expected {row.expected}"
    else:
        yield ""


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return ""
    if row.better is Better.NEITHER:
        return f"{row.ratio:.2f}"
    good = row.ratio >= 1 if row.better is Better.HIGHER else row.ratio <= 1
    return f"[{'green' if good else 'red'}]{row.ratio:.2f}[/]"


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def run_part(
    part: Part,
    asked: Asked,
    limit_secs: float,
    environment: Mapping[str, str],
    command: Sequence[str] = COMMAND,
) -> Outcome:
    """Run a part; one that crashes, or is not done in time, has failed and says how."""
    adopt_orphans()
    bystanders = set(descendants(os.getpid()))
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"gpu_check-{part.name}.log"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as output:
        answer = Path(folder) / "answer.json"
        process = subprocess.Popen(
            [*command, part.name, json.dumps(asked.as_json()), str(answer)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            how = _wait(process, limit_secs)
        finally:
            _end(process, bystanders)
        if answer.exists():
            return read_outcome(json.loads(answer.read_bytes()))
    return Outcome(
        part=part.name,
        status=Status.FAILED,
        reason=f"{how}; the end of {log}:\n{_tail(log)}",
        secs=time.monotonic() - began,
    )


def adopt_orphans() -> None:
    """Every process that a part leaves behind becomes a child of this one, which ends it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> Sequence[int]:
    """The children of a process, and theirs."""
    parents = dict(_parents())
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def name_of(pid: int) -> str:
    """What a process calls itself, cut to 15 characters by the kernel; "" if it has ended."""
    try:
        return (PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def _wait(process: subprocess.Popen[bytes], limit_secs: float) -> str:
    try:
        status = process.wait(limit_secs)
    except subprocess.TimeoutExpired:
        return f"not done within {limit_secs:.0f} s"
    if status < 0:
        return f"it crashed with {signal.Signals(-status).name}"
    return f"it ended with status {status}"


def _end(process: subprocess.Popen[bytes], bystanders: Set[int]) -> None:
    """SIGTERM, which makes a part stop its servers; then SIGKILL to all that it has started."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECS)
    finally:
        _kill_left(bystanders)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0)


def _kill_left(bystanders: Set[int]) -> None:
    """What a part left behind is ours by now, as are the children of what is killed here.

    A process that hangs in a driver cannot be killed, and is not awaited beyond the time.
    """
    deadline = time.monotonic() + KILL_SECS
    while left := set(descendants(os.getpid())) - bystanders:
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_SECS)


def _parents() -> Iterator[tuple[int, int]]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                yield int(folder.name), int(fields[1])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])


def main() -> None:
    """Check, and write down what was found; what is not foreseen ends with a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers
    name, asked, answer = sys.argv[1:]
    outcome = _outcome(name, Asked(**json.loads(asked)))
    written = Path(f"{answer}.written")
    written.write_text(json.dumps(outcome.as_json()))
    written.rename(answer)  # whole, or not there: this process may be killed at any time


def _outcome(name: str, asked: Asked) -> Outcome:
    began = time.monotonic()
    status, reason = Status.FAILED, ""
    try:
        rows = importlib.import_module(f"loadtests.gpu_check.{name}").check(asked)
        return judged(name, rows, time.monotonic() - began)
    except Skipped as error:
        status, reason = Status.SKIPPED, str(error)
    except (ServerFailed, StreamFailed, LoadTestFailed) as error:
        reason = str(error)
    return Outcome(part=name, status=status, reason=reason, secs=time.monotonic() - began)
