"""The command `all`: runs of load tests one after the other, and the page of their figures."""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import orjson
from rich.console import Console

from loadtests.figures.chart import chart
from loadtests.figures.claims import GROUPS, PERF_ANALYZER, RUNS, TRITON, Run, flag
from loadtests.figures.page import page
from loadtests.figures.stored import FOLDER, STORED, read
from loadtests.support import results, rounds
from loadtests.support.servers import LoadTestFailed

PAGE, CHART = FOLDER / "figures.md", FOLDER / "figures.svg"
STOP_SECS = 60.0
"""An interrupted load test stops its servers before it ends."""


def all(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Run the load tests of the page one after the other, store their figures, write the page.

    A run without its peer or its packages is skipped. Lines that are not measured keep their last
    figures.
    """
    rounds.add_flags(parser)
    for name in (TRITON, PERF_ANALYZER):
        parser.add_argument(flag(name), metavar="COMMAND", help="as the load tests have it")
    for name in ("server_cpus", "client_cpus"):
        parser.add_argument(flag(name), metavar="LIST", help="as the load tests have it")
    parser.add_argument(
        "--only",
        type=tests_of,
        default=tuple(GROUPS),
        metavar="NAME,NAME",
        help=f"load tests (default: {','.join(GROUPS)})",
    )
    parser.add_argument(
        "--short", action="store_true", help="short windows and loads: show that each works"
    )
    parser.add_argument(
        "--from-results",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="measure nothing: add the figures of these files of results, and write the page",
    )
    asked, console = parser.parse_args(arguments), Console()
    with rounds.failures_as_lines("all"):
        if asked.from_results is not None:
            _store(asked.from_results, asked.short, console)
        else:
            _run_all([run for run in RUNS if run.test in asked.only], asked, console)


def tests_of(text: str) -> Sequence[str]:
    """The load tests in a list with commas; ArgumentTypeError for an unknown one."""
    found = text.split(",")
    if unknown := set(found) - set(GROUPS):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}: expected some of {','.join(GROUPS)}")
    return found


def _run_all(runs: Sequence[Run], asked: argparse.Namespace, console: Console) -> None:
    failed = [run.name for run in runs if not _run(run, asked, console)]
    if failed:
        raise LoadTestFailed(f"failed: {', '.join(failed)}")


def _run(run: Run, asked: argparse.Namespace, console: Console) -> bool:
    """Whether a run has stored its figures, or was skipped."""
    if reason := lacking(run, asked):
        console.print(f"{run.name}: skipped, {reason}", markup=False, highlight=False)
        return True
    console.rule(run.name)
    results.FOLDER.mkdir(exist_ok=True)
    to = results.FOLDER / f"{run.name.replace(' ', '')}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    status = ended(command(run, asked, to), run.limit_secs)
    if status is None:
        console.print(f"{run.name}: stopped after {run.limit_secs:g} s", highlight=False)
    elif status:
        console.print(f"{run.name}: failed with status {status}", highlight=False)
    if to.exists():
        _store([to], asked.short, console)
    return status == 0


def ended(words: Sequence[str], limit_secs: float) -> int | None:
    """The exit status of a process; None beyond the limit, with SIGTERM and later SIGKILL."""
    process = subprocess.Popen(words)
    try:
        return process.wait(limit_secs)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def lacking(run: Run, asked: argparse.Namespace) -> str:
    """The reason to skip a run; "" for none."""
    needed = [flag(each) for each in run.peers if not getattr(asked, each)]
    if needed:
        return f"it needs {' and '.join(needed)}"
    missing = [each for each in run.packages if importlib.util.find_spec(each) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def command(run: Run, asked: argparse.Namespace, to: Path) -> Sequence[str]:
    """The command of a run."""
    words = [sys.executable, "-m", "loadtests", run.test, *run.arguments]
    words += [run.rounds_flag, str(asked.rounds), "--save-to", str(to)]
    if asked.short:
        words += run.short
    for name in (*run.peers, "server_cpus", "client_cpus"):
        if value := getattr(asked, name):
            words += [flag(name), value]
    return words


def _store(files: Sequence[Path], short: bool, console: Console) -> None:
    """Add the figures of files of results to the stored ones, and write the page and its chart."""
    figures = read()
    for file in files:
        figures = figures.merged(orjson.loads(file.read_bytes()), short=short)
    STORED.write_bytes(figures.dump())
    PAGE.write_text(page(figures))
    CHART.write_text(chart(figures))
    console.print(f"written: {PAGE}", soft_wrap=True, markup=False, highlight=False)
