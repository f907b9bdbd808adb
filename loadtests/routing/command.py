"""Rules for the choice of a replica, compared in a simulated fleet."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from gateway.fleet.announcer import LOAD_SECS
from loadtests.routing.conversations import conversations
from loadtests.routing.fleet import Fleet, Options, Outcome
from loadtests.routing.policies import COST, RULES
from loadtests.routing.times import times_of_a_choice
from loadtests.routing.workload import (
    SYSTEM_TOKENS,
    Prompt,
    read_trace,
    synthetic,
)
from loadtests.support import rounds
from loadtests.support.curves import Panel, draw
from loadtests.support.results import Line, Metric, Results, number
from loadtests.support.rounds import Report

RATE_OF_REPLICA = 0.9
"""Requests a second: round robin is near saturation then."""
CONVERSATIONS, SESSIONS = "conversations", "sessions"
OLD_SECS = 1.0
OLD = f"{COST}, loads {OLD_SECS:g} s old"
STAYING = f"{COST}, without recalls"
LIMITS: Mapping[str, float] = {
    "round-robin": 0.15,
    "fewest-requests": 0.35,
    "sglang": 0.4,
    "ray-prefix": 0.4,
}
"""The highest mean first token of the router's rule, over that of another rule."""
SAME_LIMIT = 1.1
"""The highest mean with more routers, or old loads, over that of one router."""
POINTS = 60
MOST = 10_000
HEADINGS = ("first, s", "p99, s", "cached", "whole p90, s", "moved", "ratio", "bound")


def routing(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Simulate a fleet with the router's own rule and those of others."""
    rounds.add_flags(parser)
    parser.set_defaults(rounds=1)
    for name, default, text in (
        ("--replicas", 16, "replicas"),
        ("--routers", 4, "routers, compared with one"),
        ("--requests", 6000, "requests of a run"),
        ("--seed", 1, "the seed of the first round"),
    ):
        parser.add_argument(
            name, type=rounds.positive, default=default, metavar="N", help=f"{text} ({default})"
        )
    parser.add_argument(
        "--policy",
        action="append",
        choices=[COST, *RULES],
        help="a rule; repeat it for several (all)",
    )
    parser.add_argument(
        "--rate", type=_number, metavar="N", help="requests a second (0.9 for each replica)"
    )
    parser.add_argument(
        "--workload",
        choices=[CONVERSATIONS, SESSIONS],
        default=CONVERSATIONS,
        help="conversations like those of Mooncake's trace, or sessions with shared system prompts",
    )
    parser.add_argument(
        "--system-tokens",
        type=_number,
        default=SYSTEM_TOKENS,
        metavar="N",
        help=f"mean length of the 50 system prompts of sessions ({SYSTEM_TOKENS:g})",
    )
    parser.add_argument(
        "--load-secs",
        type=_number,
        default=LOAD_SECS,
        metavar="SECS",
        help=f"longest time from a change to a replica's load; 0: at once ({LOAD_SECS})",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake's JSONL or Azure's CSV (sessions)"
    )
    parser.add_argument(
        "--grow-to", type=rounds.positive, metavar="N", help="replicas after 90 s (no more)"
    )
    parser.add_argument(
        "--times", action="store_true", help="also the time of a choice among 1,000 replicas"
    )
    parser.add_argument("--to", type=Path, metavar="FILE.svg", help="the first tokens as curves")
    rounds.run_test(parser, arguments, _routing)


def _number(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if 0 <= found <= MOST:
        return found
    raise argparse.ArgumentTypeError(f"'{text}': expected a number from 0 to {MOST:,}")


GROW_AT_SECS = 90.0


def _routing(asked: argparse.Namespace, _: Path, console: Console) -> Report:
    rate = asked.rate or RATE_OF_REPLICA * asked.replicas
    line = Line(f"{_name(asked)}, {rate:g} requests/s", "request", asked.replicas, "replica")
    results = Results()
    first: dict[str, Outcome] = {}
    with rounds.progress_bar(console) as bar:
        task = bar.add_task("", total=asked.rounds * len(_runs(asked, 1)) * asked.requests)
        for seed in range(asked.seed, asked.seed + asked.rounds):
            prompts = _prompts(asked, rate, seed)
            for name, options in _runs(asked, seed).items():
                bar.update(task, description=f"seed {seed}: {name}")
                outcome = Fleet(options).run(prompts, partial(bar.advance, task))
                results.add(name, _figures(line, outcome))
                first.setdefault(name, outcome)
    if asked.to:
        _draw(asked.to, str(line), first)
    notes = [times_of_a_choice(Random(asked.seed))] if asked.times else []
    return Report(_table(line, results, list(first)), results.as_lines(), notes)


def _name(asked: argparse.Namespace) -> str:
    if asked.trace:
        return str(asked.trace.name)
    if asked.workload == CONVERSATIONS:
        return CONVERSATIONS
    return f"sessions, system prompts of {asked.system_tokens:g} tokens"


def _prompts(asked: argparse.Namespace, rate: float, seed: int) -> Sequence[Prompt]:
    if asked.trace:
        return read_trace(asked.trace, rate, asked.requests)
    if asked.workload == CONVERSATIONS:
        return conversations(rate, asked.requests, Random(seed))
    return synthetic(rate, asked.requests, Random(seed), asked.system_tokens)


def _runs(asked: argparse.Namespace, seed: int) -> Mapping[str, Options]:
    """The router's rule and its variants first, then the rules of others."""
    make: Callable[..., Options] = partial(
        Options,
        replicas=asked.replicas,
        seed=seed,
        grow_to=asked.grow_to or 0,
        grow_at=GROW_AT_SECS,
    )
    policies = asked.policy or [COST, *RULES]
    runs = {}
    if COST in policies:
        runs[COST] = make(load_secs=asked.load_secs)
        if asked.routers > 1:
            name = f"{COST}, {asked.routers} routers"
            routers = {"load_secs": asked.load_secs, "routers": asked.routers}
            runs[name] = make(**routers)
            runs[f"{name}, prompts as other changes"] = make(**routers, prompt_secs=math.inf)
        runs[OLD] = make(load_secs=OLD_SECS, prompt_secs=OLD_SECS)
    if COST in policies and asked.grow_to:
        runs[STAYING] = make(load_secs=asked.load_secs, recalls=False)
    return {**runs, **{each: make(policy=each) for each in RULES if each in policies}}


def _figures(line: Line, outcome: Outcome) -> Mapping[Metric, float]:
    return {
        line.lower("first token, mean", "s"): outcome.mean,
        line.lower("first token, p99", "s"): outcome.p99,
        line.other("cached share of prompts"): outcome.cached_share,
        line.lower("whole answer, p90", "s"): outcome.whole_p90,
        line.other("requests that moved"): outcome.moved,
    }


def _table(line: Line, results: Results, names: Sequence[str]) -> Table:
    """A row for each rule: mean and p99 of the first token; ratios are of means."""
    table = Table(title=f"Choice of a replica: {line}", title_justify="left")
    table.add_column("rule", no_wrap=True)
    metrics = list(results.values)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for name in names:
        values = [results.median(metric, name) for metric in metrics]
        cells = [number(values[0]), number(values[1]), f"{values[2]:.0%}", number(values[3])]
        table.add_row(name, *cells, f"{values[4]:g}", *_bound(results, name, names))
    return table


def _bound(results: Results, name: str, names: Sequence[str]) -> tuple[str, str]:
    """The ratio of the router's rule to another, or of a variant to it, and its limit."""
    mean = next(iter(results.values))
    if name == COST or COST not in names:
        return "", ""
    is_variant = name.startswith(COST)
    pair = (name, COST) if is_variant else (COST, name)
    ratio = results.ratio(mean, *pair)
    limit = SAME_LIMIT if is_variant and name != STAYING else LIMITS.get(name)
    if ratio is None or limit is None:
        return f"{ratio or 0:.2f}", ""
    return f"{ratio:.2f}", f"{limit:g}, {'holds' if ratio <= limit else 'fails'}"


def _draw(path: Path, title: str, outcomes: Mapping[str, Outcome]) -> None:
    """Curves of the mean first token of requests that arrive at the same time."""
    first = next(iter(outcomes.values()))
    arrivals = [each.prompt.at for each in first.served]
    size = max(1, len(arrivals) // POINTS)
    starts = range(0, len(arrivals), size)
    panels = [
        Panel(
            f"{name}: first token, mean, s",
            [_mean(outcome.first_secs[start : start + size]) for start in starts],
        )
        for name, outcome in outcomes.items()
    ]
    draw(path, title, [arrivals[start] for start in starts], panels)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
