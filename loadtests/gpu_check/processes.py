"""The process of one part: its time limit, and its descendants.

`python -m loadtests.gpu_check.processes NAME OPTIONS FILE` runs one part.
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
from pathlib import Path

from loadtests.gpu_check.outcome import Outcome, Skipped, Status, judged, read_outcome
from loadtests.gpu_check.parts import Asked, Part
from loadtests.support.http_client import StreamFailed
from loadtests.support.rounds import LoadTestFailed
from loadtests.support.servers import LOG_TAIL, LOGS, ServerFailed

PROC = Path("/proc")
PR_SET_CHILD_SUBREAPER = 36
STOP_SECS = 20.0
"""Seconds for a part to end its servers after SIGTERM."""
KILL_SECS = 5.0
POLL_SECS = 0.02
COMMAND = (sys.executable, "-m", "loadtests.gpu_check.processes")


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
    outcome = _check(name, Asked(**json.loads(asked)))
    written = Path(f"{answer}.written")
    written.write_text(json.dumps(outcome.as_json()))
    written.rename(answer)  # whole, or not there: this process may be killed at any time


def _check(name: str, asked: Asked) -> Outcome:
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


if __name__ == "__main__":
    main()
