"""Changes of models, with bounds: object storage, single versions, rollouts, models asleep."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from loadtests import change_residence, change_rollouts, change_storage
from loadtests.support import rounds
from loadtests.support.findings import Part, report_of
from loadtests.support.rounds import Report
from loadtests.tensors import add_parts_flag

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
    return report_of("Changes of models", PARTS, asked, folder, console)
