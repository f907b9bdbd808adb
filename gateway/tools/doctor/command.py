"""The command `sluice doctor`: probes, findings and their order."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.backend_loader import BackendLoader
from gateway.settings import ENVIRONMENT
from gateway.tools.doctor import exposure, machine, packages, probes, report, runtimes
from gateway.tools.doctor.exposure import Place
from gateway.tools.doctor.packages import DISTRIBUTION, Declared, Versions, declared
from gateway.tools.doctor.probes import Outcome, Question
from gateway.tools.doctor.report import Finding, Health, Section, is_broken

NVML: Question = ("nvml",)
TORCH: Question = ("torch",)
ONNXRUNTIME: Question = ("onnxruntime",)
UNKNOWN = Finding(
    DISTRIBUTION,
    "neither installed nor in a checkout, so that no range of versions is known",
    Health.BROKEN,
    f"pip install {DISTRIBUTION}",
)


def run(parsed: argparse.Namespace) -> bool:
    """Write the findings to stdout; returns whether all installed parts work."""
    with _shown(Console(stderr=True)) as progress:
        found = examine(parsed.limit_secs, progress)
    server = Place.of(parsed.url)
    metrics = None if parsed.metrics_url is None else Place.of(parsed.metrics_url)
    parts = [*found, Section("exposure", list(exposure.findings(server, metrics)))]
    if parsed.json:
        sys.stdout.write(json.dumps(report.data(parts), indent=2) + "\n")
    else:
        console = Console()
        console.print(report.table(parts))
        console.print(report.summary(parts), highlight=False)
    return not is_broken(parts)


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[int, Question | None], None]]:
    """A transient progress bar; nothing if stderr is no terminal."""
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


def questions(versions: Versions) -> Sequence[Question]:
    """The probes to run, the slowest first."""
    found = sorted(BackendLoader().names, key=lambda name: name not in ("vllm", "pytorch"))
    asked: list[Question] = [("backend", name) for name in found]
    if "torch" in versions:
        asked.append(TORCH)
    if any(name in versions for name in packages.ONE_FOLDER):
        asked.append(ONNXRUNTIME)
    return [*asked, NVML]


def examine(
    limit_secs: float, progress: Callable[[int, Question | None], None]
) -> Sequence[Section]:
    """Examine the machine; `progress` gets the number of probes and each probe that ends."""

    wanted = declared()
    names = packages.named(wanted) if wanted else set()
    versions = packages.installed({*names, *packages.RUNTIME_PACKAGES})
    asked = questions(versions)
    progress(len(asked), None)
    outcomes = probes.ask(asked, limit_secs, lambda each: progress(len(asked), each))
    return [
        Section("packages", _packages(wanted, versions, bool(runtimes.gpus(outcomes[NVML])))),
        Section("backends", list(runtimes.backends(_of_backends(outcomes), versions))),
        Section("GPUs", list(_gpus(outcomes))),
        Section("machine", list(machine.findings())),
        Section("models", list(machine.model_store(ENVIRONMENT))),
        Section("ports", list(machine.ports())),
    ]


def _packages(wanted: Declared | None, versions: Versions, has_gpu: bool) -> Sequence[Finding]:
    return [UNKNOWN] if wanted is None else list(packages.findings(wanted, versions, has_gpu))


def _of_backends(outcomes: Mapping[Question, Outcome]) -> Mapping[str, Outcome]:
    return {asked[1]: outcomes[asked] for asked in sorted(outcomes) if asked[0] == "backend"}


def _gpus(outcomes: Mapping[Question, Outcome]) -> Sequence[Finding]:
    gpus = runtimes.gpus(outcomes[NVML])
    found = list(runtimes.driver(outcomes[NVML]))
    if TORCH in outcomes:
        found.append(runtimes.torch(outcomes[TORCH], gpus))
    if ONNXRUNTIME in outcomes:
        found.append(runtimes.onnxruntime(outcomes[ONNXRUNTIME], gpus))
    return found
