"""Golden requests of a repository without a server: the command `sluice check --golden`."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from gateway.models.golden_results import GoldenOutcome, GoldenResult
from gateway.models.model_folder import GOLDEN_FOLDER
from gateway.models.registry import VersionState
from gateway.models.repository import ModelRepository
from gateway.server import Server
from gateway.settings import (
    ControlMode,
    GoldenMode,
    GrpcSettings,
    HttpSettings,
    MetricsSettings,
    ModelSettings,
    Settings,
)

STYLES = {
    GoldenOutcome.PASSED: "green",
    GoldenOutcome.SKIPPED: "yellow",
    GoldenOutcome.FAILED: "red",
}


@dataclass(frozen=True, slots=True)
class GoldenRow:
    """A result of a model's version; "" is the version of a model that is not loaded."""

    model: str
    version: str
    result: GoldenResult


def check_golden(repository: Path, store: Path, model_name: str) -> list[GoldenRow]:
    """The results of all golden requests, in the order of models and versions.

    Models with a folder `golden/` are loaded, with the members of their ensembles; a model that
    fails to load is a failure. `store` and `model_name` are those of the server.
    """
    models = ModelSettings(
        repositories=(repository,),
        store=store,
        model_name=model_name,
        startup=_with_golden(ModelRepository([repository], model_name=model_name)),
        control_mode=ControlMode.EXPLICIT,
        exit_on_error=False,
        golden=GoldenMode.WARN,
    )
    settings = Settings(
        models=models,
        http=HttpSettings(enabled=False),
        grpc=GrpcSettings(enabled=False),
        metrics=MetricsSettings(enabled=False),
    )
    return asyncio.run(_check(settings)) if models.startup else []


def _with_golden(repository: ModelRepository) -> tuple[str, ...]:
    folders = {name: repository.find(name).path for name in repository.names()}
    return tuple(name for name, path in folders.items() if (path / GOLDEN_FOLDER).is_dir())


async def _check(settings: Settings) -> list[GoldenRow]:
    server, ready = Server(settings), asyncio.Event()

    def on_ready(ports: Mapping[str, int]) -> None:
        ready.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run(on_ready))
        await ready.wait()
        rows = await _rows(server, settings.models.startup)
        server.stop()
    return rows


async def _rows(server: Server, names: Sequence[str]) -> list[GoldenRow]:
    found = [
        GoldenRow(model.name, model.version, result)
        for model in server.dataplane.models()
        for result in model.golden
    ]
    for row in await server.dataplane.index():
        if row.name in names and row.state == VersionState.UNAVAILABLE:
            failed = GoldenResult(name="", outcome=GoldenOutcome.FAILED, reason=row.reason)
            found.append(GoldenRow(row.name, row.version, failed))
    return sorted(found, key=lambda row: (row.model, row.version, row.result.name))


def table(rows: Sequence[GoldenRow]) -> Table:
    """The results for a terminal."""
    names = ("model", "version", "request", "result", "secs", "why")
    shown = Table(*(Column(name, overflow="fold") for name in names))
    for row in rows:
        result = row.result
        outcome = Text(result.outcome, style=STYLES[result.outcome])
        if result.reason:
            outcome.append(f": {result.reason}", style="")
        texts = (Text(each) for each in (row.model, row.version, result.name))
        shown.add_row(*texts, outcome, f"{result.secs:.2f}", Text(result.why))
    return shown
