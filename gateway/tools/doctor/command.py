"""`sluice doctor`: what can this machine serve, and why not?"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.tools.doctor import report
from gateway.tools.doctor.examination import examine
from gateway.tools.doctor.finding import is_broken
from gateway.tools.doctor.probes import Question


def run(parsed: argparse.Namespace) -> bool:
    """Tell what was found on stdout; whether all that is installed works."""
    with _shown(Console(stderr=True)) as progress:
        parts = examine(parsed.limit_secs, progress)
    if parsed.json:
        sys.stdout.write(json.dumps(report.data(parts), indent=2) + "\n")
    else:
        console = Console()
        console.print(report.table(parts))
        console.print(report.summary(parts), highlight=False)
    return not is_broken(parts)


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[int, Question | None], None]]:
    """A bar that goes away; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("importing backends")

        def progress(total: int, answered: Question | None) -> None:
            text = "importing backends" if answered is None else f"done: {' '.join(answered)}"
            bar.update(task, total=total, description=text, advance=answered is not None)

        yield progress
