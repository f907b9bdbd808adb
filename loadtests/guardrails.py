"""Guardrails of rollouts, simulated: false alarms, and the requests until an alarm."""

import argparse
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from gateway.errors import Code, InferenceError
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.guardrails import read_guardrails
from gateway.rollouts.observation import Arm, Observation
from loadtests.support import rounds
from loadtests.support.results import Line, Results, number
from loadtests.support.rounds import Report

NS_PER_SEC = 1_000_000_000
ALPHA = 0.01
SHARE_OF_ALPHA = ALPHA / 3
"""That of one guardrail of three."""
RAMP = (0.1, 0.5, 0.9)
"""The weights of a null run, each for a third of it."""
BROKEN = InferenceError(Code.INTERNAL, "broken")
START_NS = NS_PER_SEC


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests to two versions.

    `stable` and `candidate` are shares of requests that fail, at once; others take `answer_secs`.
    Each of the `weights` holds for an equal part of the run. With `keys` each request has one by
    Zipf, and its version sticks to that. The rates are `burst` times as high in the middle fifth.
    The share `broken_client` are requests of one client on the candidate; half of them fail.
    """

    stable: float
    candidate: float
    weights: Sequence[float] = RAMP
    requests: int = 20_000
    rate: float = 20.0
    answer_secs: float = 0.0
    keys: int = 0
    burst: float = 1.0
    broken_client: float = 0.0


@dataclass(frozen=True, slots=True)
class Alarm:
    """The requests until a breach, and those on the candidate."""

    requests: int
    candidate: int


def simulate(scenario: Scenario, seed: int, alpha: float = ALPHA) -> Alarm | None:
    """Run the requests of a scenario through the evidence; None without a breach."""
    evidence = Evidence(read_guardrails({"errors": {}}, "guardrails"), alpha)
    arms, fails, keys = _traffic(scenario, np.random.default_rng(seed))
    step_ns = int(NS_PER_SEC / scenario.rate)
    answer_ns = int(scenario.answer_secs * NS_PER_SEC)
    running: deque[Observation] = deque()
    now, judged, on_candidate = START_NS, START_NS, 0
    for count, (arm, has_failed, key) in enumerate(zip(arms, fails, keys, strict=True)):
        now += step_ns
        while running and running[0].admitted_ns + answer_ns <= now:
            _end(running.popleft(), answer_ns, None)
        if now - judged >= NS_PER_SEC:
            judged = now
            if evidence.judge(now):
                return Alarm(count, on_candidate)
        on_candidate += arm
        request = evidence.tap(ARMS[arm], b"" if key < 0 else b"%d" % key)
        if request is None:
            continue
        request.admitted_ns = request.received_ns = now
        evidence.admit(request)
        if has_failed:
            _end(request, 0, BROKEN)
        else:
            running.append(request)
    return None


ARMS = (Arm.STABLE, Arm.CANDIDATE)


def _end(request: Observation, after_ns: int, error: InferenceError | None) -> None:
    request.ended_ns = request.admitted_ns + after_ns
    request.finish(error)


def _traffic(
    scenario: Scenario, random: np.random.Generator
) -> tuple[list[int], list[bool], list[int]]:
    """The arm, the failure and the key of each request; key -1 for none."""
    count = scenario.requests
    part = np.minimum(np.arange(count) * len(scenario.weights) // count, len(scenario.weights) - 1)
    weights = np.asarray(scenario.weights)[part]
    keys = np.full(count, -1)
    coins = random.random(count)
    if scenario.keys:
        shares = 1 / np.arange(1, scenario.keys + 1)
        keys = random.choice(scenario.keys, count, p=shares / shares.sum())
        coins = random.random(scenario.keys)[keys]
    arms = coins < weights
    rates = np.where(arms, scenario.candidate, scenario.stable)
    in_burst = (np.arange(count) * 5 // count) == 2
    rates = np.minimum(np.where(in_burst, rates * scenario.burst, rates), 1.0)
    if scenario.broken_client:
        is_client = random.random(count) < scenario.broken_client
        arms, keys = arms | is_client, np.where(is_client, 0, keys)
        rates = np.where(is_client, 0.5, rates)
    return arms.astype(int).tolist(), (random.random(count) < rates).tolist(), keys.tolist()


FALSE_ALARMS: Mapping[str, Scenario] = {
    "0.1 %": Scenario(0.001, 0.001),
    "1 %": Scenario(0.01, 0.01),
    "10 %": Scenario(0.1, 0.1),
    "30 %": Scenario(0.3, 0.3),
    "2 %, ten times for a while": Scenario(0.02, 0.02, burst=10),
    "5 %, candidate 2 %": Scenario(0.05, 0.02),
    "2 %, sticky keys by Zipf": Scenario(0.02, 0.02, keys=500),
    "2 %, 500 requests/s, answers of 5 s": Scenario(0.02, 0.02, rate=500, answer_secs=5),
    "1 %, a fifth is one client that repeats a broken prompt": Scenario(
        0.01, 0.01, rate=5, broken_client=0.2
    ),
    "1 %, a fiftieth is such a client": Scenario(0.01, 0.01, rate=5, broken_client=0.02),
    "5 %, 100 keys by Zipf": Scenario(0.05, 0.05, keys=100, rate=100),
}
"""Runs in which the candidate is as good as stable, at weights of 10, 50 and 90 %."""
NULL = "2 %, sticky keys by Zipf"


def detection(stable: float, candidate: float, weight: float, requests: int) -> Scenario:
    """A run at one weight."""
    return Scenario(stable, candidate, (weight,), requests)


ALARMS: Mapping[str, tuple[Scenario, int | None]] = {
    "1 -> 100 %, weight 10": (detection(0.01, 1.0, 0.1, 2000), 100),
    "1 -> 50 %, weight 10": (detection(0.01, 0.5, 0.1, 4000), None),
    "1 -> 10 %, weight 10": (detection(0.01, 0.1, 0.1, 10_000), None),
    "1 -> 5 %, weight 10": (detection(0.01, 0.05, 0.1, 20_000), 6000),
    "1 -> 2 %, weight 10": (detection(0.01, 0.02, 0.1, 40_000), None),
    "1 -> 2 %, weight 50": (detection(0.01, 0.02, 0.5, 40_000), None),
    "0.1 -> 1 %, weight 10": (detection(0.001, 0.01, 0.1, 40_000), None),
    "5 -> 10 %, weight 10": (detection(0.05, 0.1, 0.1, 40_000), None),
    "5 -> 10 %, weight 50": (detection(0.05, 0.1, 0.5, 40_000), None),
}
"""Runs with a worse candidate, and the limit of the median of requests until the alarm."""
MOST_FALSE_ALARMS = 5 / 200


def guardrails(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Simulate rollouts with candidates as good as stable, and with worse ones."""
    rounds.add_flags(parser)
    parser.set_defaults(rounds=1)
    for name, default, text in (
        ("--null-runs", 200, "runs of the row with sticky keys; a fifth of it of other rows"),
        ("--runs", 20, "runs of a row with a worse candidate"),
        ("--seed", 1, "the seed of the first run"),
    ):
        parser.add_argument(
            name, type=rounds.positive, default=default, metavar="N", help=f"{text} ({default})"
        )
    rounds.run_test(parser, arguments, _guardrails)


def _guardrails(asked: argparse.Namespace, _: Path, console: Console) -> Report:
    table = Table(title="Guardrails of rollouts, simulated", title_justify="left")
    table.add_column("stable -> candidate", no_wrap=True)
    for heading in ("runs", "alarms", "requests", "on the candidate", ""):
        table.add_column(heading, justify="right")
    results = Results()
    line = Line("simulated rollouts", "request", 1, "run")
    failures = []
    with rounds.progress_bar(console) as bar:
        task = bar.add_task("", total=len(FALSE_ALARMS) + len(ALARMS))
        for name, scenario in FALSE_ALARMS.items():
            bar.update(task, description=name, advance=1)
            runs = asked.null_runs if name == NULL else max(1, asked.null_runs // 5)
            found = _alarms(scenario, asked.seed, runs, ALPHA)
            holds = len(found) <= MOST_FALSE_ALARMS * runs
            failures += [] if holds else [name]
            results.add(
                f"as good: {name}", {line.lower("false alarms", "of a run"): len(found) / runs}
            )
            table.add_row(f"as good: {name}", f"{runs}", f"{len(found)}", "", "", _verdict(holds))
        for name, (scenario, limit) in ALARMS.items():
            bar.update(task, description=name, advance=1)
            found = _alarms(scenario, asked.seed, asked.runs, SHARE_OF_ALPHA)
            # A run without an alarm is longer than all with one.
            requests = _median(found, [each.requests for each in found], asked.runs)
            on_candidate = _median(found, [each.candidate for each in found], asked.runs)
            holds = limit is None or requests <= limit
            failures += [] if holds else [name]
            results.add(name, {line.lower("requests until the alarm", ""): requests})
            cells = (number(requests), number(on_candidate))
            verdict = "" if limit is None else f"{limit:,}: {_verdict(holds)}"
            table.add_row(name, f"{asked.runs}", f"{len(found)}", *cells, verdict)
    failure = f"the bound fails for {', '.join(failures)}" if failures else ""
    return Report(table, results.as_lines(), failure=failure)


def _verdict(holds: bool) -> str:
    return "holds" if holds else "fails"


def _alarms(scenario: Scenario, seed: int, runs: int, alpha: float) -> list[Alarm]:
    found = (simulate(scenario, each, alpha) for each in range(seed, seed + runs))
    return [alarm for alarm in found if alarm is not None]


def _median(alarms: Sequence[Alarm], values: Sequence[int], runs: int) -> float:
    return statistics.median([*values, *[float("inf")] * (runs - len(alarms))])


if __name__ == "__main__":
    guardrails(argparse.ArgumentParser("python -m loadtests guardrails"), sys.argv[1:])
