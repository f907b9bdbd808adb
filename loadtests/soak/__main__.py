"""Random clients for a given time: `make soak ARGS='--minutes 10 --seed 7'`."""

import argparse
import random
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtests.soak.models import MODELS
from loadtests.soak.probe import Sample
from loadtests.soak.requests import Tally
from loadtests.soak.soak import Options, Report, run
from loadtests.support import rounds

MIB = 2**20


def main() -> None:
    """Run, print a table, and exit 1 if anything hung, leaked or was wrong."""
    asked = _parser().parse_args()
    console = Console()
    flags = [f"--frontends={asked.frontends}"] if asked.frontends else []
    flags += [f"--grpc-transport={asked.grpc_transport}"] if asked.grpc_transport else []
    options = Options(asked.minutes * 60, asked.seed, flags)
    console.print(f"seed {options.seed}")
    with rounds.failures_as_lines("soak"), tempfile.TemporaryDirectory() as folder:
        report = _run(options, Path(folder), console)
        console.print(_table(report))
        for line in (*report.failures, report.late, *report.waiting):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if asked.log:
            asked.log.write_bytes((Path(folder) / "log").read_bytes())
    if report.failures or report.late:
        raise SystemExit(rounds.EXIT_FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.soak", description=__doc__)
    parser.add_argument(
        "--minutes", type=_positive, default=1.0, help="length of the storm (default: 1)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=random.randrange(10**6),
        help="begin of the random numbers (default: another one each time)",
    )
    parser.add_argument("--frontends", type=rounds.positive, help="frontend processes (none)")
    parser.add_argument("--grpc-transport", choices=("hyper", "grpcio"))
    parser.add_argument("--log", type=Path, help="write the server's log to this file")
    return parser


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if found <= 0:
        raise argparse.ArgumentTypeError(f"'{text}': expected a number above 0")
    return found


def _run(options: Options, folder: Path, console: Console) -> Report:
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
    rows = {
        "requests": f"{tally.asked.total():,}",
        "answered and checked": f"{tally.answered.total():,}",
        "refused, as they may be": f"{tally.refused.total():,}",
        "clients that left": f"{leaves:,}",
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
        "result": ", ".join(
            f"{len(getattr(report, each))} {each}" for each in ("hung", "leaked", "wrong")
        ),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _sample(sample: Sample) -> str:
    milliseconds = [f"{each * 1000:.0f}" for each in (sample.server, sample.control, sample.queued)]
    return "{} ms (another server {}, waiting for a CPU {})".format(*milliseconds)


def _is_leave(name: str) -> bool:
    return any(word in name for word in ("leave", "reset", "half", "slow", "close", "deadline"))


if __name__ == "__main__":
    main()
