"""One run of the soak: a storm of clients, and the checks during and after it."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from loadtests.soak import census
from loadtests.soak import server as servers
from loadtests.soak.census import Census
from loadtests.soak.models import MODELS, Trouble
from loadtests.soak.probe import Probes, probing
from loadtests.soak.requests import Tally
from loadtests.soak.server import SoakServer
from loadtests.soak.storm import Storm, ask_each

RECOVER_SECS = 30.0
HUNG_SECS = 5.0
"""How long the models are asked when a client has hung already."""

SETTLE_SECS = 15.0
POLL_SECS = 0.25
STOPPING_SECS = 1.0
"""How long clients ask before SIGTERM, and after it."""

IN_FLIGHT = "gateway_requests_in_flight"
PENDING = "nv_inference_pending_request_count"
SUCCESS = "nv_inference_request_success"
FAILURE = "nv_inference_request_failure"
SHOWN_TASKS = 25
PLACES = 6

Metrics = Mapping[tuple[str, str], float]
Progress = Callable[[str, Tally], None]
"""Called a few times a second with the stage of the run."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is run: `flags` are further flags of the server."""

    secs: float
    seed: int
    flags: Sequence[str] = ()


@dataclass(slots=True)
class Report:
    """What came of a run; it is good if there are no failures."""

    options: Options
    tally: Tally
    probes: Probes = field(default_factory=lambda: Probes([]))
    hung: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    """Where the tasks of the server stand after a hang."""

    @property
    def failures(self) -> Sequence[str]:
        """All that must not be, in words, but for late probes."""
        return [
            *(f"hung: {each}" for each in self.hung),
            *(f"leaked: {each}" for each in self.leaked),
            *(f"wrong: {each}" for each in self.wrong),
        ]

    @property
    def late(self) -> str:
        """Why the probes are not good, in words; new connections wait for a killed frontend."""
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


def run(options: Options, folder: Path, progress: Progress = lambda stage, tally: None) -> Report:
    """Serve, run the storm, and check the rest; `folder` is empty and keeps the server's log."""
    report = Report(options, Tally())
    progress("starting", report.tally)
    with servers.serving(folder, options.flags) as server:
        before = uvloop.run(_run(server, report, progress))
        report.leaked += server.wait_stopped(before)
        report.wrong += server.errors()
    return report


async def _run(server: SoakServer, report: Report, progress: Progress) -> Census:
    silent = await ask_each(server, RECOVER_SECS)
    before, metrics = await asyncio.to_thread(server.take_census), server.metrics()
    if silent:
        report.wrong += (f"before the storm: {each}" for each in silent)
        server.begin_stop()
        return before
    with probing(server.ports["http"], server.pid) as probes:
        shown = asyncio.create_task(_show(server, report, progress))
        try:
            storm = Storm(server, report.tally, report.options.seed)
            await storm.run(report.options.secs)
        finally:
            shown.cancel()
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
    report.memory_bytes |= {"before": before.memory_bytes, "after": after.memory_bytes}
    progress("stopping", report.tally)
    report.hung += await _stop(server, report.options.seed)
    return before


async def _stop(server: SoakServer, seed: int) -> Sequence[str]:
    """SIGTERM in the middle of another storm; its clients may meet anything but a silence."""
    tally = Tally(cuts=True)
    storm = asyncio.create_task(Storm(server, tally, seed + 1).run(2 * STOPPING_SECS))
    await asyncio.sleep(STOPPING_SECS)
    server.begin_stop()
    await storm
    return [f"{each}, while the server stopped" for each in _counted(tally.hung)]


async def _show(server: SoakServer, report: Report, progress: Progress) -> None:
    began = time.monotonic()
    while True:
        left = max(0.0, report.options.secs - (time.monotonic() - began))
        if left > report.options.secs / 2:
            report.memory_bytes["half-way"] = census.memory(server.pid)
        progress(f"storm, {left:.0f} s left", report.tally)
        await asyncio.sleep(POLL_SECS)


async def _settled(server: SoakServer, report: Report) -> Metrics:
    """The metrics when no request is in flight; requests that stay are leaks."""
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
    """Where the server's counters and those of the clients contradict each other.

    A client that leaves does not learn how its request ended, and a model that was reloaded counts
    anew. What others call has more requests than clients know of.
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
    """The census once the server holds no more than before; what stays is a leak."""
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
    """The tasks that were not there before the storm; alike ones once, with their number."""
    now = Counter(line.partition(" < ")[0] for line in lines)
    new = {name for name, count in now.items() if count > before.tasks.get(name, 0)}
    found = Counter(_shortened(line) for line in lines if line.partition(" < ")[0] in new)
    return [f"{count} x {line}" for line, count in found.most_common(SHOWN_TASKS)]


def _shortened(line: str) -> str:
    """A task and the last of the lines in which it waits."""
    name, *places = line.split(" < ")
    return " < ".join((name, *(["..."] if len(places) > PLACES else []), *places[-PLACES:]))
