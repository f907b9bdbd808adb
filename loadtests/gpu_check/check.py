"""The check of all parts: a process with a time limit for each, and a table of their rows.

`run_one` is the main function of such a process; its descendants end with it.
"""

import argparse
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

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtests.gpu_check.parts import (
    CPU,
    CUDA,
    PARTS,
    ROOT,
    Asked,
    Part,
    cards,
    is_installed,
    missing,
    why_none,
    write_distribution,
)
from loadtests.support import results, rounds
from loadtests.support.results import Better
from loadtests.support.servers import ENVIRONMENT, LOGS, LoadTestFailed, descendants, tail

LIMIT_SECS = 600.0
SHORTEST_SECS = 15.0
"""No part starts with less time than that."""
SIZES = {CUDA: ([1, 32, 256], 128, 3.0), CPU: ([1, 4], 16, 1.0)}
"""Default streams, tokens of each answer, and seconds of a rate."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
PR_SET_CHILD_SUBREAPER = 36
STOP_SECS = 20.0
"""Seconds for a part to end its servers after SIGTERM."""
KILL_SECS = 5.0
POLL_SECS = 0.02
COMMAND = (sys.executable, "-c", "from loadtests.gpu_check.check import run_one; run_one()")


class Status(StrEnum):
    """The result of a part."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Skipped(Exception):
    """A part cannot be checked on this machine; the text has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of the gateway and, where it has one, of the runtime alone.

    A row without an expectation is `ok` with any figure; `expected` is in words.
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
    """The end of a part; `reason` is that of a skipped or failed one."""

    part: str
    status: Status
    reason: str = ""
    secs: float = 0.0
    rows: Sequence[Row] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "rows": [row.as_json() for row in self.rows]}


def judged(part: str, rows: Sequence[Row], secs: float) -> Outcome:
    """The outcome of a part that ended: passed if every row is `ok`."""
    bad = [
        f"{row.name}: found {row.gateway:g}, expected {row.expected}" for row in rows if not row.ok
    ]
    status = Status.FAILED if bad else Status.PASSED
    return Outcome(part=part, status=status, reason="; ".join(bad), secs=secs, rows=rows)


def read_outcome(saved: Mapping[str, Any]) -> Outcome:
    """The outcome in the file of a part's process."""
    rows = [
        Row(**{**row, "better": Better(row["better"])})
        for row in ({k: v for k, v in each.items() if k != "ratio"} for each in saved["rows"])
    ]
    return Outcome(**{**saved, "status": Status(saved["status"]), "rows": rows})


def check(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Check, print and save; the status is 1 if a part has failed."""
    _add_flags(parser)
    parsed, console = parser.parse_args(arguments), Console()
    asked = _asked(parsed)
    with rounds.failures_as_lines("gpu_check"), tempfile.TemporaryDirectory() as folder:
        outcomes = run(asked, parsed.limit_secs, chosen(parsed.parts), Path(folder), console)
    names = cards()
    on = ", ".join(names) if asked.device == CUDA and names else asked.device
    console.print(table(f"Sluice on {on}", outcomes))
    saved = {**vars(parsed), **asked.as_json(), "cards": names}
    parts = {"results": [each.as_json() for each in outcomes]}
    results.print_path(results.save("gpu_check", saved, parts), console)
    if any(each.status is Status.FAILED for each in outcomes):
        raise SystemExit(rounds.EXIT_FAILED)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Parts: " + "; ".join(f"{part.name}: {part.asks}" for part in PARTS)
    parser.add_argument("--device", choices=tuple(SIZES), default=CUDA, help="(default: cuda)")
    parser.add_argument("--parts", default="", metavar="NAME,NAME", help="(default: all)")
    parser.add_argument("--streams", type=rounds.positive_list, metavar="N,N")
    parser.add_argument("--max-tokens", type=rounds.positive, metavar="N")
    parser.add_argument("--secs", type=float, metavar="SECS", help="of each rate of a tensor model")
    parser.add_argument(
        "--limit-secs",
        type=float,
        default=LIMIT_SECS,
        metavar="SECS",
        help="limit of all parts together (default: %(default)g)",
    )


def _asked(parsed: argparse.Namespace) -> Asked:
    streams, max_tokens, secs = SIZES[parsed.device]
    return Asked(
        device=parsed.device,
        streams=parsed.streams or streams,
        max_tokens=parsed.max_tokens or max_tokens,
        secs=parsed.secs or secs,
    )


def run(
    asked: Asked, limit_secs: float, parts: Sequence[Part], folder: Path, console: Console
) -> Sequence[Outcome]:
    """Run the parts in turn; `folder` is for the entry points of this source."""
    deadline = time.monotonic() + limit_secs
    environment = _environment(folder)
    no_gpu = why_none()
    outcomes = []
    for part in parts:
        left = deadline - time.monotonic() - STOP_SECS - KILL_SECS
        reason = why_not(part, asked, no_gpu, left)
        if reason:
            outcome = Outcome(part=part.name, status=Status.SKIPPED, reason=reason)
        else:
            limit = min(part.limit_secs, left)
            with console.status(f"{part.name} ({part.asks}), at most {limit:.0f} s"):
                outcome = run_part(part, asked, limit, environment)
        console.print(f"{part.name}: {outcome.status}", highlight=False)
        outcomes.append(outcome)
    return outcomes


def why_not(part: Part, asked: Asked, no_gpu: str, left_secs: float) -> str:
    """The reason to skip a part; "" for none."""
    if asked.device == CUDA and no_gpu:
        return f"{no_gpu}; --device {CPU} tries what needs none"
    if part.only_gpu and asked.device != CUDA:
        return "this is about GPUs only"
    if lacking := missing(part.needs):
        return f"not installed: {', '.join(lacking)}"
    if left_secs < SHORTEST_SECS:
        return "no time was left: --limit-secs"
    return ""


def chosen(names: str) -> Sequence[Part]:
    """The named parts in their own order; all parts without names."""
    known = {part.name: part for part in PARTS}
    wanted = names.split(",") if names else list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"gpu_check: no part '{unknown[0]}'; there is: {', '.join(known)}")
    return [part for part in PARTS if part.name in wanted]


def _environment(folder: Path) -> Mapping[str, str]:
    """The environment of every part: without network, and with this source as installed."""
    path = [str(ROOT)]
    if not is_installed():
        write_distribution(folder / "site")
        path.append(str(folder / "site"))
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, **ENVIRONMENT, **OFFLINE, "PYTHONPATH": os.pathsep.join(path)}


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
        for row in filter(_is_shown, outcome.rows):
            made.add_row(f"  {escape(row.name)}", *_cells(row))
        made.add_section()
    return made


def _is_shown(row: Row) -> bool:
    """A row without a verdict is in the file only."""
    return row.expected != "" or row.better is not Better.NEITHER


def _cells(row: Row) -> Iterator[str]:
    yield "" if row.alone is None else _number(row.alone)
    yield _number(row.gateway)
    yield results.coloured(row.better, row.ratio)
    if row.expected:
        yield f"{'[green]ok[/]' if row.ok else '[bold red]wrong[/]'}: expected {row.expected}"
    else:
        yield ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def run_part(
    part: Part,
    asked: Asked,
    limit_secs: float,
    environment: Mapping[str, str],
    command: Sequence[str] = COMMAND,
) -> Outcome:
    """Run a part in a process; a crash and the end of its time are failures."""
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
        reason=f"{how}; the end of {log}:\n{tail(log)}",
        secs=time.monotonic() - began,
    )


def adopt_orphans() -> None:
    """Make each process that a part leaves running a child of this one, which ends it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wait(process: subprocess.Popen[bytes], limit_secs: float) -> str:
    try:
        status = process.wait(limit_secs)
    except subprocess.TimeoutExpired:
        return f"not done within {limit_secs:.0f} s"
    if status < 0:
        return f"it crashed with {signal.Signals(-status).name}"
    return f"it ended with status {status}"


def _end(process: subprocess.Popen[bytes], bystanders: Set[int]) -> None:
    """SIGTERM, at which a part stops its servers; then SIGKILL to all its processes."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECS)
    finally:
        _kill_left(bystanders)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0)


def _kill_left(bystanders: Set[int]) -> None:
    """Kill the remaining processes of a part, which are children of this one by now.

    A process that hangs in a driver cannot be killed, so the wait has a limit.
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


def run_one() -> None:
    """Check the part of the command line, and write its outcome; other errors have a traceback."""
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
        part = next(each for each in PARTS if each.name == name)
        module = importlib.import_module(f"loadtests.gpu_check.{part.module}")
        rows = getattr(module, f"check_{name}")(asked)
        return judged(name, rows, time.monotonic() - began)
    except Skipped as error:
        status, reason = Status.SKIPPED, str(error)
    except LoadTestFailed as error:
        reason = str(error)
    return Outcome(part=name, status=status, reason=reason, secs=time.monotonic() - began)
