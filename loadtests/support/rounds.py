"""Interleaved rounds: each server in turn is started, measured under every load, and stopped."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtests.support.http_client import StreamFailed
from loadtests.support.results import Metric, Results
from loadtests.support.servers import Contender, Cpus, Server, ServerFailed, serving

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

Step = tuple[str, Callable[[Server], Mapping[Metric, float]]]
"""One measurement of a server: what it is called while it runs, and how it is taken."""


class LoadTestFailed(Exception):
    """What was measured cannot be true; the text says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: `steps` has the steps of each contender, by its name."""

    contenders: Sequence[Contender]
    steps: Mapping[str, Sequence[Step]]
    rounds: int
    server_cpus: Cpus

    @property
    def length(self) -> int:
        """How many steps there are in all."""
        return self.rounds * sum(len(self.steps[each.name]) for each in self.contenders)


def run(plan: Plan, console: Console) -> Results:
    """Measure everything; a bar shows how far it is."""
    results = Results()
    with progress_bar(console) as bar:
        task = bar.add_task("", total=plan.length)
        for number in range(1, plan.rounds + 1):
            for contender in plan.contenders:
                where = f"round {number}: {contender.name}"
                bar.update(task, description=f"{where}, starting")
                with serving(contender.launch(), plan.server_cpus) as server:
                    for name, step in plan.steps[contender.name]:
                        bar.update(task, description=f"{where}, {name}")
                        results.add(contender.name, step(server))
                        bar.advance(task)
    return results


def progress_bar(console: Console) -> Progress:
    """A bar that hardly costs anything: what it takes, the servers lack."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=1,
    )


def tell_file(path: Path, console: Console) -> None:
    """Say where the results are."""
    console.print(f"saved: {path}", soft_wrap=True, markup=False, highlight=False)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flag `--rounds`."""
    parser.add_argument(
        "--rounds",
        type=positive,
        default=3,
        metavar="N",
        help="rounds of each server, in turn (default: %(default)s)",
    )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}': expected a whole number of at least 1")


def positive_list(text: str) -> Sequence[int]:
    """Whole numbers such as 1,8,32."""
    return [positive(part) for part in text.split(",")]


@contextmanager
def failures_as_lines(name: str) -> Iterator[None]:
    """Make a failure one message and a status, and SIGTERM end the servers as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (ServerFailed, StreamFailed, LoadTestFailed) as error:
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
