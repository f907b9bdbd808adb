"""One run of the soak: a storm of clients, the checks during and after it, and its table."""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtests.soak import server as servers
from loadtests.soak.models import MODELS, Trouble
from loadtests.soak.probe import Probes, Sample, probing
from loadtests.soak.requests import Tally
from loadtests.soak.server import Census, SoakServer
from loadtests.soak.slopes import Reading, few, growing, panels, rows
from loadtests.soak.storm import Storm, ask_each
from loadtests.support import rounds
from loadtests.support.curves import draw
from loadtests.support.servers import resident_bytes

RECOVER_SECS = 30.0
HUNG_SECS = 5.0
"""Seconds for asking the models after a client has hung."""

SETTLE_SECS = 15.0
POLL_SECS = 0.25
STOPPING_SECS = 1.0
"""Seconds with clients before SIGTERM, and after it."""

IN_FLIGHT = "gateway_requests_in_flight"
PENDING = "nv_inference_pending_request_count"
SUCCESS = "nv_inference_request_success"
FAILURE = "nv_inference_request_failure"
SHOWN_TASKS = 25
LEAST_READ_SECS, READ_SECS, READINGS = 1.0, 10.0, 12
"""The bounds of the interval of readings, and their number in a short run."""
PLACES = 6
MIB = 2**20

Metrics = Mapping[tuple[str, str], float]
OnStage = Callable[[str, Tally], None]
"""Called a few times a second with the stage of the run."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run; `flags` are further flags of the server, or of a router."""

    secs: float
    seed: int
    flags: Sequence[str] = ()
    is_router: bool = False


@dataclass(slots=True)
class Report:
    """The result of a run; it is good if there are no failures."""

    options: Options
    tally: Tally
    probes: Probes = field(default_factory=lambda: Probes([]))
    readings: list[Reading] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    """The tasks of the server after a hang, with the lines in which they wait."""

    @property
    def failures(self) -> Sequence[str]:
        """All failures in words, except late probes."""
        return [
            *(f"hung: {each}" for each in self.hung),
            *(f"leaked: {each}" for each in self.leaked),
            *(f"wrong: {each}" for each in self.wrong),
        ]

    @property
    def late(self) -> str:
        """The failure of the probes in words, unless frontends were killed, and started again."""
        if self.probes.good or self.tally.cuts:
            return ""
        worst = self.probes.worst.unexplained
        return f"late: the server held {self.probes.held} probes, one for {worst:.2f} s"

    @property
    def text(self) -> str:
        """The failures, and after a hang the tasks of the server."""
        lines = [f"seed {self.options.seed}", *self.failures]
        return "\n".join(
            [*lines, *(["tasks of the server:"] if self.waiting else []), *self.waiting]
        )


def run(options: Options, folder: Path, progress: OnStage = lambda stage, tally: None) -> Report:
    """Serve, run the storm, and check; `folder` is empty and keeps the server's log."""
    report = Report(options, Tally())
    progress("starting", report.tally)
    with servers.serving(folder, options.flags, is_router=options.is_router) as server:
        before = uvloop.run(_run(server, report, progress))
        report.leaked += server.wait_stopped(before)
        report.wrong += server.errors()
    return report


async def _run(server: SoakServer, report: Report, progress: OnStage) -> Census:
    silent = await ask_each(server, RECOVER_SECS)
    before, metrics = await asyncio.to_thread(server.take_census), server.metrics()
    if silent:
        report.wrong += (f"before the storm: {each}" for each in silent)
        server.begin_stop()
        return before
    with probing(server.ports["http"], server.pid) as probes:
        shown = asyncio.create_task(_show(server, report, progress))
        reading = asyncio.create_task(_read(server, report))
        try:
            storm = Storm(server, report.tally, report.options.seed)
            await while_alive(server, storm.run(report.options.secs))
        finally:
            shown.cancel()
            report.wrong += await _ended(reading)
    if death := server.death:
        report.wrong.append(death)
        return before
    if report.options.secs >= READINGS * LEAST_READ_SECS:
        report.wrong += few(report.readings)
    report.probes = probes[0]
    progress("settling", report.tally)
    report.hung += _counted(report.tally.hung)
    report.wrong += report.tally.surprises
    if report.hung:
        report.waiting = _new_tasks(storm.tasks, before)
    patience = HUNG_SECS if report.hung else RECOVER_SECS
    report.wrong += accounts(report.tally, metrics, await _settled(server, report))
    report.hung += await ask_each(server, patience)
    after = await _leaks(server, before, report)
    report.leaked += growing(report.readings, await asyncio.to_thread(server.read, collected=True))
    report.memory_bytes |= {"before": before.memory_bytes, "after": after.memory_bytes}
    progress("stopping", report.tally)
    report.hung += await _stop(server, report.options.seed)
    return before


async def while_alive(server: SoakServer, storm: Coroutine[Any, Any, None]) -> None:
    """Run the storm, until the server ends at the latest."""
    running = asyncio.create_task(storm)
    while not (running.done() or server.death):
        await asyncio.wait([running], timeout=POLL_SECS)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def _stop(server: SoakServer, seed: int) -> Sequence[str]:
    """SIGTERM in the middle of another storm; its clients may have any error but a hang."""
    tally = Tally(cuts=True)
    storm = asyncio.create_task(Storm(server, tally, seed + 1).run(2 * STOPPING_SECS))
    await asyncio.sleep(STOPPING_SECS)
    server.begin_stop()
    await storm
    return [f"{each}, while the server stopped" for each in _counted(tally.hung)]


async def _show(server: SoakServer, report: Report, progress: OnStage) -> None:
    began = time.monotonic()
    while True:
        left = max(0.0, report.options.secs - (time.monotonic() - began))
        if left > report.options.secs / 2:
            report.memory_bytes["half-way"] = resident_bytes(server.pid)
        progress(f"storm, {left:.0f} s left", report.tally)
        await asyncio.sleep(POLL_SECS)


async def _read(server: SoakServer, report: Report) -> None:
    """Read the server every ten seconds, in a short run more often."""
    began = time.monotonic()
    every = max(LEAST_READ_SECS, min(READ_SECS, report.options.secs / READINGS))
    for number in count(1):
        await asyncio.sleep(began + number * every - time.monotonic())
        counts = await asyncio.to_thread(server.read)
        report.readings.append(Reading(time.monotonic() - began, counts))


async def _ended(reading: asyncio.Task[None]) -> Sequence[str]:
    """The end of the readings; the error that has ended them before, in words."""
    reading.cancel()
    (found,) = await asyncio.gather(reading, return_exceptions=True)
    if isinstance(found, asyncio.CancelledError):
        return []
    return [f"the server could not be read: {found!r}"]


async def _settled(server: SoakServer, report: Report) -> Metrics:
    """The metrics when no request is in flight; requests that remain are leaks."""
    deadline = time.monotonic() + SETTLE_SECS
    while True:
        metrics = await asyncio.to_thread(server.metrics)
        gauges = ((name, model) for name, model in metrics if name in (IN_FLIGHT, PENDING))
        left = [
            f"{name} of {model} is {metrics[name, model]:g}"
            for name, model in gauges
            if metrics[name, model]
        ]
        if not left:
            return metrics
        if time.monotonic() > deadline:
            report.leaked += left
            return metrics
        await asyncio.sleep(POLL_SECS)


def accounts(tally: Tally, before: Metrics, after: Metrics) -> Sequence[str]:
    """The contradictions between the counters of the server and of the clients.

    A client that disconnects does not see the end of its request, and a reloaded model counts
    anew. A model that others call has more requests than those of clients.
    """
    found = []
    for model in MODELS:
        if Trouble.RELOADED in model.troubles:
            continue
        success, failure = (
            after.get((name, model.name), 0.0) - before.get((name, model.name), 0.0)
            for name in (SUCCESS, FAILURE)
        )
        answered, asked = tally.answered[model.name], tally.asked[model.name]
        if success < answered:
            found.append(f"{model.name} counts {success:g} successes, clients had {answered}")
        if Trouble.CALLED not in model.troubles and success + failure > asked:
            found.append(
                f"{model.name} counts {success + failure:g} requests, clients made {asked}"
            )
    return found


async def _leaks(server: SoakServer, before: Census, report: Report) -> Census:
    """The census once the server holds no more than before; the rest is a leak."""
    deadline = time.monotonic() + SETTLE_SECS
    while True:
        after = await asyncio.to_thread(server.take_census)
        left = [*after.grown(before), *after.lost(before)]
        if not left:
            return after
        if time.monotonic() > deadline:
            report.leaked += left
            return after
        await asyncio.sleep(POLL_SECS)


def _counted(found: Sequence[str]) -> Sequence[str]:
    return [f"{count} x {each}" for each, count in Counter(found).most_common()]


def _new_tasks(lines: Sequence[str], before: Census) -> list[str]:
    """The tasks that are new since before the storm; alike ones once, with their number."""
    now = Counter(line.partition(" < ")[0] for line in lines)
    new = {name for name, count in now.items() if count > before.tasks.get(name, 0)}
    found = Counter(_shortened(line) for line in lines if line.partition(" < ")[0] in new)
    return [f"{count} x {line}" for line, count in found.most_common(SHOWN_TASKS)]


def _shortened(line: str) -> str:
    """A task and the last of the lines in which it waits."""
    name, *places = line.split(" < ")
    return " < ".join((name, *(["..."] if len(places) > PLACES else []), *places[-PLACES:]))


def soak(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Run, print a table, and exit 1 if anything hung, leaked or was wrong."""
    _add_flags(parser)
    asked, console = parser.parse_args(arguments), Console()
    flags = [f"--frontends={asked.frontends}"] if asked.frontends else []
    flags += [f"--grpc-transport={asked.grpc_transport}"] if asked.grpc_transport else []
    options = Options(asked.secs or asked.minutes * 60, asked.seed, flags, asked.router)
    console.print(f"seed {options.seed}")
    with rounds.failures_as_lines("soak"), tempfile.TemporaryDirectory() as folder:
        report = _run_with_bar(options, Path(folder), console)
        console.print(_table(report))
        for line in (*report.failures, report.late, *report.waiting):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if asked.to:
            title = f"soak of {options.secs:g} s, seed {options.seed}"
            draw(asked.to, title, [each.secs for each in report.readings], panels(report.readings))
        if asked.log:
            asked.log.write_bytes((Path(folder) / "log").read_bytes())
    if report.failures or report.late:
        raise SystemExit(rounds.EXIT_FAILED)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=_positive, default=1.0, help="length of the storm (default: 1)"
    )
    parser.add_argument("--secs", type=_positive, help="the same in seconds")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.randrange(10**6),
        help="seed of the random numbers (default: a new one)",
    )
    parser.add_argument("--frontends", type=rounds.positive, help="default: none")
    parser.add_argument("--grpc-transport", choices=("hyper", "grpcio"))
    parser.add_argument(
        "--router",
        action="store_true",
        help="have the models at two replicas of a router, which are killed now and then",
    )
    parser.add_argument("--to", type=Path, metavar="SVG", help="draw the readings to this file")
    parser.add_argument("--log", type=Path, help="write the server's log to this file")


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if found <= 0:
        raise argparse.ArgumentTypeError(f"'{text}': expected a number above 0")
    return found


def _run_with_bar(options: Options, folder: Path, console: Console) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=2) as bar:
        task = bar.add_task("", total=None)

        def progress(stage: str, tally: Tally) -> None:
            text = f"{stage}: {tally.asked.total():,} requests, {tally.answered.total():,} answered"
            bar.update(task, description=text)

        return run(options, folder, progress)


def _table(report: Report) -> Table:
    tally, probes = report.tally, report.probes
    leaves = sum(count for name, count in tally.acts.items() if _is_leave(name))
    table = Table(title=f"{len(MODELS)} models, {report.options.secs:g} s", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    lines = {
        "requests": f"{tally.asked.total():,}",
        "answered and checked": f"{tally.answered.total():,}",
        "refused, as they may be": f"{tally.refused.total():,}",
        "clients that disconnected": f"{leaves:,}",
        "reloads": f"{sum(c for name, c in tally.acts.items() if 'load' in name):,}",
        "kills": f"{sum(c for name, c in tally.acts.items() if 'kill' in name):,}",
        "probes of /v2/health/live": f"{len(probes.samples):,}",
        "p50, p99, max": ", ".join(f"{probes.latency(s) * 1000:.0f} ms" for s in (0.5, 0.99, 1)),
        "later than 100 ms": f"{probes.late}, {probes.held} of them not by the machine",
        "least explained": _sample(probes.worst),
        "memory before, half-way, after": ", ".join(
            f"{report.memory_bytes.get(each, 0) / MIB:.0f} MiB"
            for each in ("before", "half-way", "after")
        ),
        **{f"{name}, in ten minutes": found for name, found in rows(report.readings).items()},
        "result": ", ".join(
            f"{len(getattr(report, each))} {each}" for each in ("hung", "leaked", "wrong")
        ),
    }
    for name, value in lines.items():
        table.add_row(name, value)
    return table


def _sample(sample: Sample) -> str:
    milliseconds = [f"{each * 1000:.0f}" for each in (sample.server, sample.control, sample.queued)]
    return "{} ms (another server {}, waiting for a CPU {})".format(*milliseconds)


def _is_leave(name: str) -> bool:
    return any(word in name for word in ("leave", "reset", "half", "slow", "close", "deadline"))
