"""Interleaved steps of servers: their plan, their report, and the command of a load test."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtests.support.results import (
    Metric,
    Results,
    comparison,
    describe,
    machine,
    print_path,
    save,
)
from loadtests.support.servers import (
    Contender,
    Cpus,
    LoadTestFailed,
    Server,
    add_cpu_flags,
    pinned,
    serving,
)

Each = TypeVar("Each")

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

Step = tuple[str, Callable[[Server], Mapping[Metric, float]]]
"""One measurement of a server, with its name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Rounds of contenders; `steps` has the steps of each contender, by its name.

    All servers of a round run at the same time, and each step measures one after the other: a slow
    minute affects all of them. Every second step reverses their order, as does every second round.
    """

    contenders: Sequence[Contender]
    steps: Mapping[str, Sequence[Step]]
    rounds: int
    server_cpus: Cpus

    @property
    def length(self) -> int:
        """The number of all steps."""
        return self.rounds * sum(len(self.steps[each.name]) for each in self.contenders)


@dataclass(frozen=True, slots=True)
class Report:
    """The table and the lines of a load test; `notes` are texts below the table.

    A `failure` is the reason for a failed test whose lines are saved all the same.
    """

    table: Table
    lines: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    failure: str = ""


Measure = Callable[[argparse.Namespace, Path, Console], Report]
"""A load test with its arguments and an empty folder."""


def run_test(parser: argparse.ArgumentParser, arguments: Sequence[str], measure: Measure) -> None:
    """Run a load test on the client's CPUs, print its report and save it.

    The last word of the parser's `prog` is the name of the test and of its file of results.
    """
    name = parser.prog.split()[-1]
    add_cpu_flags(parser)
    parser.add_argument("--save-to", type=Path, metavar="FILE", help="default: in results/")
    asked, console = parser.parse_args(arguments), Console()
    with failures_as_lines(name), pinned(asked.client_cpus), TemporaryDirectory() as folder:
        report = measure(asked, Path(folder), console)
        console.print(report.table)
        for note in (*report.notes, f"{time.strftime('%Y-%m-%d')}: {describe(machine())}"):
            console.print(note, soft_wrap=True, highlight=False, markup=False)
        path = save(name, vars(asked), {"lines": report.lines}, asked.save_to)
        print_path(path, console)
        if report.failure:
            raise LoadTestFailed(report.failure)


def compare_contenders(
    title: str,
    contenders: Sequence[Contender],
    steps: Mapping[str, Sequence[Step]] | Sequence[Step],
    asked: argparse.Namespace,
    console: Console,
) -> tuple[Results, Report]:
    """Measure contenders in rounds; `steps` are of each contender by name, or of all."""
    names = [each.name for each in contenders]
    each = steps if isinstance(steps, Mapping) else dict.fromkeys(names, steps)
    results = run(Plan(contenders, each, asked.rounds, asked.server_cpus), console)
    return results, Report(comparison(title, results, names), results.as_lines())


def run(plan: Plan, console: Console) -> Results:
    """Measure everything, with a bar of the progress."""
    results = Results()
    with progress_bar(console) as bar:
        task = bar.add_task("", total=plan.length)
        for number in range(1, plan.rounds + 1):
            with ExitStack() as stack:
                lists = []
                for contender in plan.contenders:
                    name = contender.name
                    bar.update(task, description=f"round {number}: {name}, starting")
                    server = stack.enter_context(serving(contender.launch(), plan.server_cpus))
                    lists.append([(name, server, *step) for step in plan.steps[name]])
                for name, server, step_name, step in _in_turn(lists, number):
                    bar.update(task, description=f"round {number}: {name}, {step_name}")
                    results.add(name, step(server))
                    bar.advance(task)
    return results


def _in_turn(lists: Sequence[Sequence[Each]], number: int) -> Iterator[Each]:
    """The first element of each list, then the second of each in reverse order, and so on."""
    for place, row in enumerate(zip_longest(*lists), number):
        yield from filter(None, row[:: 1 if place % 2 else -1])


def progress_bar(console: Console) -> Progress:
    """A bar of the progress, redrawn once a second: it takes processor time from the servers."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=1,
    )


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
    except LoadTestFailed as error:
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
