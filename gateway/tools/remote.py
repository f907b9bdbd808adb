"""The commands `sluice fetch ADDRESS` and `sluice cache`: the cache of remote repositories."""

import argparse
import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from gateway.errors import InferenceError
from gateway.flags.remote import cache_roots
from gateway.flags.remote import repository as remote_repository
from gateway.models.fetching import fetch as fetch_version
from gateway.models.repository import ModelId, ModelRepository
from gateway.observability.log import line_handler
from gateway.settings import ENVIRONMENT, MODEL_NAME
from gateway.storage.mirror.blobs import GIB
from gateway.storage.mirror.cache import CachedTree, RemoteCache
from gateway.storage.mirror.downloads import DownloadProgress, Report, rarely
from gateway.storage.mirror.opening import open_places
from gateway.storage.store import StoreError


def fetch(parsed: argparse.Namespace, console: Console) -> None:
    """Fetch the versions that a server would serve, of the named models or of all.

    A model that fails does not stop the others; StoreError at the end names all failures.
    """
    with _warnings_shown():
        _fetch_all(parsed, console)


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Warnings of the server's parts are lines on stderr, as a server writes them."""
    handler, logger = line_handler(), logging.getLogger("sluice")
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _fetch_all(parsed: argparse.Namespace, console: Console) -> None:
    address, *names = parsed.names
    repository = ModelRepository(
        open_places([remote_repository(address, parsed, ENVIRONMENT)], ENVIRONMENT),
        parsed.model_config_name,
        model_name=ENVIRONMENT.get(MODEL_NAME, ""),
    )
    asyncio.run(repository.remote.settle())
    if not (names or repository.names()):
        raise StoreError(f"'{address}' has no model, or only models that are being uploaded")
    failures = []
    for name in names or repository.names():
        try:
            _fetch(repository, name, console)
        except InferenceError as error:
            failures.append(f"model '{name}': {error.message}")
    if failures:
        raise StoreError("\n".join(failures))


def look_after(parsed: argparse.Namespace, console: Console) -> bool:
    """List, verify or clean the caches of all clouds; whether no file is damaged."""
    caches = [RemoteCache(root) for root in cache_roots(ENVIRONMENT)]
    if parsed.action == "list":
        console.print(table([tree for cache in caches for tree in cache.list()]))
    elif parsed.action == "clean":
        freed = sum(cache.clean() for cache in caches)
        console.print(f"{freed / GIB:.1f} GiB deleted")
    else:
        damaged = [file for cache in caches for file in cache.damaged()]
        for file in damaged:
            state = "in use" if file.in_use else "deleted"
            console.print(f"damaged, {state}: {file.address}", soft_wrap=True, markup=False)
        console.print(f"{len(damaged)} damaged files")
        return not damaged
    return True


def table(trees: list[CachedTree]) -> Table:
    """The models of a cache for a terminal."""
    shown = Table(Column("model", overflow="fold"), "GiB", "last use", "state")
    for each in trees:
        state = "in use" if each.in_use else "whole" if each.whole else "partial"
        at = datetime.fromtimestamp(each.used_at, UTC).isoformat(" ", "minutes")
        shown.add_row(each.address, f"{each.size / GIB:.1f}", at, state)
    return shown


def _fetch(repository: ModelRepository, name: str, console: Console) -> None:
    source = repository.source(ModelId(name))
    versions = source.entry.versions(source.config.version_policy)
    for version in versions:
        with _shown(f"{name} {version}", console) as report:
            tree = fetch_version(source, version, threading.Event(), report)
        path = tree.path / str(version)
        tree.release()
        console.print(f"{name} {version}: {path}", soft_wrap=True, markup=False, highlight=False)


@contextmanager
def _shown(what: str, console: Console) -> Iterator[Report]:
    """A progress bar on a terminal, a line every 10 s elsewhere."""
    if not console.is_terminal:
        yield rarely(lambda each: console.print(f"{what}: {each}", markup=False, highlight=False))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TransferSpeedColumn(), console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)

        def report(progress: DownloadProgress) -> None:
            bars.update(task, total=progress.total, completed=progress.done)

        yield report
