"""Changes of models, with bounds: object storage, single versions, rollouts, models asleep."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtests import change_residence, change_rollouts, change_storage
from loadtests.support import rounds
from loadtests.support.findings import Finding
from loadtests.support.results import Results
from loadtests.support.rounds import Report
from loadtests.tensors import add_parts_flag

Part = Callable[[argparse.Namespace, Path, Console, Results], Sequence[Finding]]
"""One part of the test with an empty folder; it adds its values to the results."""
PARTS: dict[str, Part] = {
    "download": change_storage.download,
    "poll": change_storage.poll,
    "version": change_storage.version,
    "identity": change_rollouts.identity,
    "llm": change_rollouts.llm,
    "before": change_rollouts.before,
    "failing": change_rollouts.failing,
    "shadow": change_rollouts.shadow,
    "zipf": change_residence.zipf,
    "turns": change_residence.turns,
}


def change(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Measure downloads, polls, rollouts and models asleep, and compare each with its bound.

    The simulation of guardrails is `guardrails`.
    """
    add_parts_flag(parser, tuple(PARTS))
    for flag, default, text in (
        ("--size-mib", 2048, "size of the model of `download`, in 8 files"),
        ("--requests", 3000, "requests of one client in `identity`, `before` and `shadow`"),
        ("--runs", 20, "rollouts of `failing`"),
        ("--secs", 120, "length of `zipf` and of `turns`"),
    ):
        parser.add_argument(
            flag, type=rounds.positive, default=default, metavar="N", help=f"{text} ({default})"
        )
    parser.add_argument(
        "--before", metavar="REVISION", help="the revision that `before` compares with"
    )
    rounds.add_flags(parser)
    rounds.run_test(parser, arguments, _change)


def _change(asked: argparse.Namespace, folder: Path, console: Console) -> Report:
    table = Table(title="Changes of models", title_justify="left")
    table.add_column("figure")
    for heading in ("found", "bound", ""):
        table.add_column(heading, justify="right")
    results, failures = Results(), []
    for name in asked.parts:
        (folder / name).mkdir()
        for each in PARTS[name](asked, folder / name, console, results):
            table.add_row(f"{name}: {each.figure}", each.shown, each.bound, each.verdict)
            failures += [] if each.holds else [f"{name}: {each.figure}"]
    failure = f"the bound fails for {', '.join(failures)}" if failures else ""
    return Report(table, results.as_lines(), failure=failure)
