"""From a requirements.txt to a virtual environment, made once for all models that say the same."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from backends.python.environments.commands import CommandFailed, Progress, run
from backends.python.environments.kept_folders import KeptFolders
from gateway.errors import Code, InferenceError
from gateway.threads import apart

FILE = "requirements.txt"
PIP_SAYS_LITTLE = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
LARGEST_FILE_BYTES = 1 << 20
"""Requirement files and small wheels beside them are read, larger files go by size and time."""
MOST_FILES = 10_000
"""Of a folder that is named, so many files are looked at."""

_COMMENTS = re.compile(r"(?:^|\s)#.*")
_WORDS = re.compile(r"[\s=@'\"]+")


async def virtual_environment(requirements: Path, model: str, kept: KeptFolders) -> Path:
    """The folder of a virtual environment with those requirements, and numpy.

    Python's own venv and pip make it: they are there wherever Python is, and read the settings by
    which the user's indexes are found. InferenceError with pip's last lines if they cannot.
    """
    builder = _Builder(requirements, model)
    return await kept.get(await apart(_digest, requirements), builder.build)


class _Builder:
    """The steps, each a command whose progress is told in the log."""

    def __init__(self, requirements: Path, model: str) -> None:
        self._requirements = requirements
        self._model = model
        self._progress = Progress({"model": model, "of": requirements.name})

    async def build(self, folder: Path) -> None:
        python = folder / "bin" / "python"
        try:
            await self._run(sys.executable, "-P", "-m", "venv", folder)
            await self._install(python)
            if not await apart(_has_numpy, folder):
                await self._install(python, "numpy")
            self._progress.end()
        except CommandFailed as error:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"model '{self._model}': the environment that its {FILE} asks for cannot be made: "
                f"{error}",
            ) from None

    async def _install(self, python: Path, *more: str) -> None:
        # The file again for what comes on top: it may name indexes, and hold versions down.
        pip = (python, "-P", "-m", "pip", "install", "--progress-bar", "off")
        await self._run(*pip, "-r", self._requirements.name, *more)

    async def _run(self, *command: str | Path) -> None:
        # Paths in the file are relative to it, and names without folders do no harm in messages.
        folder = self._requirements.parent
        await run(command, folder, PIP_SAYS_LITTLE, self._progress)


def _has_numpy(folder: Path) -> bool:
    return any(folder.glob("lib/python*/site-packages/numpy/__init__.py"))


def _digest(requirements: Path) -> str:
    """What the environment is made of: this Python, the requirements, and the files they name."""
    digest = hashlib.sha256()
    about = (sys.version, sys.base_prefix, platform.platform(), sys.implementation.cache_tag)
    digest.update(repr(about).encode())
    for part in _parts(requirements, set()):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def _parts(file: Path, seen: set[Path]) -> Iterator[bytes]:
    seen.add(file)
    content = _content(file)
    yield content
    if file.suffix not in (".txt", ".in"):
        return
    text = _COMMENTS.sub("", content.decode(errors="replace"))
    for word in sorted(set(_WORDS.split(text))):
        named = file.parent / word
        if word and named not in seen and os.path.exists(named):  # False for what is no name
            yield word.encode()
            yield from _parts(named, seen)


def _content(file: Path) -> bytes:
    """The bytes of a small file, else what tells when it changes."""
    if file.is_file() and file.stat().st_size <= LARGEST_FILE_BYTES:
        return file.read_bytes()
    files = [file] if file.is_file() else list(islice(file.rglob("*"), MOST_FILES))
    found = [
        (str(each.relative_to(file)), each.stat().st_size, each.stat().st_mtime_ns)
        for each in sorted(files)
    ]
    return repr(found).encode()
