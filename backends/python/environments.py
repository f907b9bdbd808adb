"""The Python and the variables of a model's worker: named, unpacked or installed."""

import asyncio
import hashlib
import logging
import os
import platform
import re
import stat
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from backends.python.environment_builds import (
    NO_PATHS_OF_OURS,
    BuildProgress,
    CommandError,
    KeptFolders,
    output,
    run,
)
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.threads import apart

log = logging.getLogger("sluice.python")

PARAMETER = "EXECUTION_ENV_PATH"
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
OF_BACKEND = "pb_exec_env_model.py.tar.gz"
FOLDERS = ("venv", ".venv")
OLDEST = (3, 10)
OF_THE_SHELL = ("_", "PS1", "PWD", "OLDPWD", "SHLVL", *NO_PATHS_OF_OURS)
PROBE = "import sys, numpy; print(*sys.version_info[:2], sep='.')"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """An interpreter, and variables of its process in addition to those of the gateway."""

    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The folders to search for a model's environment, and the folder for made ones.

    `backend` is the folder of a Python-based backend. The model's own come before the backend's.
    `kept` is None if there is no folder for made environments.
    """

    version: Path
    backend: Path | None = None
    kept: Path | None

    @property
    def model(self) -> Path:
        """The model's folder."""
        return self.version.parent

    def keep(self, model: str) -> KeptFolders:
        """The folders of made environments; UNAVAILABLE without a place for them."""
        if self.kept is None:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"model '{model}': there is no place to make its environment: set SLUICE_CACHE to "
                "a folder (HOME is not set either)",
            )
        return KeptFolders(self.kept)

    @staticmethod
    def absolute(path: str) -> Path:
        """A path relative to the gateway, for processes in other folders."""
        return Path(path).absolute()


async def interpreter(config: ModelConfig, places: Places) -> WorkerEnvironment:
    """The model's own Python if it has one, else the gateway's.

    The order is: EXECUTION_ENV_PATH (an archive or a folder); `venv` or `.venv`, or else a
    requirements.txt, in the version's folder or the model's; then those of a Python-based backend.
    Making one may take minutes, and is logged. InferenceError if it is unusable or cannot be made.
    """
    if (named := config.parameters.get(PARAMETER)) is not None:
        return await _named(named, config.name, places)
    for folder in (places.version, places.model):
        if found := await _in_folder(folder.absolute(), config.name, places):
            return found
    backend = places.backend
    found = await _of_backend(backend.absolute(), config.name, places) if backend else None
    return found or WorkerEnvironment(python=Path(sys.executable))


async def _named(named: str, model: str, places: Places) -> WorkerEnvironment:
    """The environment of EXECUTION_ENV_PATH (python backend, execution environments)."""
    path = places.absolute(named.replace(MODEL_FOLDER, str(places.model)))
    if await asyncio.to_thread(path.is_file):
        path = await unpacked(path, model, places.keep(model))
    elif not await asyncio.to_thread(path.exists):
        raise InferenceError(Code.INTERNAL, f"Failed to get the canonical path for {named}.")
    elif not await asyncio.to_thread((path / "bin").is_dir):
        raise InferenceError(
            Code.INTERNAL,
            f"Path {named}/bin/activate does not exist. The Python environment should contain an "
            "'activate' script.",
        )
    return await _activated(path, named, model)


async def _of_backend(backend: Path, model: str, places: Places) -> WorkerEnvironment | None:
    if not (backend / OF_BACKEND).exists():
        return await _in_folder(backend, model, places)
    folder = await unpacked(backend / OF_BACKEND, model, places.keep(model))
    return await _activated(folder, OF_BACKEND, model)


async def _in_folder(folder: Path, model: str, places: Places) -> WorkerEnvironment | None:
    for name in FOLDERS:
        if (folder / name).is_dir():
            await _check(folder / name, name, model)
            return _virtual(folder / name)
    if (folder / FILE).is_file():
        return _virtual(await virtual_environment(folder / FILE, model, places.keep(model)))
    return None


def _virtual(folder: Path) -> WorkerEnvironment:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    variables = {**NO_PATHS_OF_OURS, "VIRTUAL_ENV": str(folder), "PATH": path}
    return WorkerEnvironment(python=folder / "bin" / "python", variables=variables)


async def _activated(folder: Path, name: str, model: str) -> WorkerEnvironment:
    """An environment with the variables that its `activate` sets, as Triton sources it."""
    await _check(folder, name, model)
    if not (folder / "bin" / "activate").exists():
        return _virtual(folder)
    variables = {**NO_PATHS_OF_OURS, **await _set_by_activate(folder, name, model)}
    return WorkerEnvironment(python=folder / "bin" / "python", variables=variables)


async def _set_by_activate(folder: Path, name: str, model: str) -> Mapping[str, str]:
    # The scripts are written for bash, and only a shell can find the variables that they set.
    script = "source bin/activate >/dev/null && exec env -0"
    try:
        said = await output(("bash", "-c", script), folder)
    except CommandError as error:
        raise _refusal(name, model, f"its 'activate' script fails: {error}") from None
    lines = (line.partition("=") for line in said.split("\0") if "=" in line)
    found = {key: value for key, _, value in lines if key not in OF_THE_SHELL}
    return {key: value for key, value in found.items() if os.environ.get(key) != value}


async def _check(folder: Path, name: str, model: str) -> None:
    """Raise INVALID_ARG unless an environment of other origin can run a worker."""
    python = folder / "bin" / "python"
    if not python.exists():
        raise _refusal(name, model, "it has no bin/python")
    try:
        version = await output((python, "-c", PROBE), folder)
    except CommandError as error:
        raise _refusal(name, model, f"its Python cannot import numpy: {error}") from None
    found, oldest = version.strip(), ".".join(map(str, OLDEST))
    if not re.fullmatch(r"\d+\.\d+", found) or tuple(map(int, found.split("."))) < OLDEST:
        why = f"its bin/python is '{found[:80]}', expected Python {oldest} or later"
        raise _refusal(name, model, why)


def _refusal(name: str, model: str, why: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG, f"model '{model}': its environment '{name}' cannot be used: {why}"
    )


FOLDER_MODE = 0o755
FILE_MODE = 0o755
"""Without set-user-id bits, and without the right to write for others."""

NO_ARCHIVE = "file could not be opened successfully"


async def unpacked(archive: Path, model: str, kept: KeptFolders) -> Path:
    """The folder with the content of a tar archive, of any compression.

    InferenceError if it is no archive, is damaged, or has a member outside of the folder.
    """
    digest = await apart(_archive_digest, archive)

    async def build(folder: Path) -> None:
        log.info("environment unpacking started", extra={"model": model, "of": archive.name})
        try:
            await _in_thread(archive, folder)
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{model}': its environment '{archive.name}' cannot be unpacked: "
                f"{_reason(error)}",
            ) from error

    return await kept.get(digest, build)


async def _in_thread(archive: Path, folder: Path) -> None:
    """Unpack in a thread; when this returns or is cancelled, the thread has ended."""
    stop = threading.Event()
    unpacking = asyncio.create_task(apart(_unpack, archive, folder, stop))
    try:
        await asyncio.shield(unpacking)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([unpacking])
        raise


class _Elsewhere(ValueError):
    """An archive's member that is no file, folder or link inside its folder."""

    def __init__(self, member: tarfile.TarInfo) -> None:
        super().__init__(f"'{member.name}' would not lie inside it")


def _unpack(archive: Path, folder: Path, stop: threading.Event) -> None:
    root = os.path.realpath(folder)
    with tarfile.open(archive) as packed:
        packed.errorlevel = 2
        # Python 3.11.0 to 3.11.3 have no filters, so the checks here are the only ones.
        packed.extraction_filter = lambda member, path: member
        for member in packed:
            if stop.is_set():
                raise tarfile.ExtractError("the load was cancelled")
            packed.extract(_checked(member, root), root)


def _checked(member: tarfile.TarInfo, root: str) -> tarfile.TarInfo:
    """The member with a file mode for this user, if it lies in the folder.

    A symbolic link may lead out: bin/python of a packed venv names the system's. A later member
    whose name or hard link resolves through it is refused.
    """
    member.name = member.name.lstrip("/")
    regular = member.isreg() or member.isdir() or member.issym() or member.islnk()
    if not regular or not _lies_in(root, member.name):
        raise _Elsewhere(member)
    if member.islnk() and not _lies_in(root, member.linkname):
        raise _Elsewhere(member)
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    member.mode = FOLDER_MODE if member.isdir() else member.mode & FILE_MODE | stat.S_IRUSR
    return member


def _lies_in(root: str, name: str) -> bool:
    """Whether a name of the archive leads into its folder, through the links made so far."""
    found = os.path.realpath(os.path.join(root, name))
    return os.path.commonpath((root, found)) == root


def _archive_digest(archive: Path) -> str:
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if str(error).startswith(NO_ARCHIVE):  # followed by a dozen lines of other formats
        return "it is no tar archive, compressed by gzip, bzip2, xz or not at all"
    return str(error).partition("\n")[0]


FILE = "requirements.txt"
PIP_SAYS_LITTLE = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
LARGEST_FILE_BYTES = 1 << 20
"""Smaller files are identified by content, larger ones by size and time."""
MOST_FILES = 10_000
"""Files of a named folder that are examined."""

_COMMENTS = re.compile(r"(?:^|\s)#.*")
_WORDS = re.compile(r"[\s=@'\"]+")


async def virtual_environment(requirements: Path, model: str, kept: KeptFolders) -> Path:
    """The folder of a virtual environment with those requirements, and numpy.

    Python's own venv and pip make it: they exist wherever Python does, and read the user's settings
    of indexes. UNAVAILABLE with pip's last lines if they fail.
    """
    builder = _Builder(requirements, model)
    return await kept.get(await apart(_requirements_digest, requirements), builder.build)


class _Builder:
    """The steps, each a command with its progress in the log."""

    def __init__(self, requirements: Path, model: str) -> None:
        self._requirements = requirements
        self._model = model
        self._progress = BuildProgress({"model": model, "of": requirements.name})

    async def build(self, folder: Path) -> None:
        python = folder / "bin" / "python"
        try:
            await self._run(sys.executable, "-P", "-m", "venv", folder)
            await self._install(python)
            if not await apart(_has_numpy, folder):
                await self._install(python, "numpy")
            self._progress.end()
        except CommandError as error:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"model '{self._model}': the environment that its {FILE} asks for cannot be made: "
                f"{error}",
            ) from None

    async def _install(self, python: Path, *more: str) -> None:
        # The file is repeated for additions: it may name indexes and limit versions.
        pip = (python, "-P", "-m", "pip", "install", "--progress-bar", "off")
        await self._run(*pip, "-r", self._requirements.name, *more)

    async def _run(self, *command: str | Path) -> None:
        # Paths in the file are relative to it, and messages then name no folders.
        folder = self._requirements.parent
        await run(command, folder, PIP_SAYS_LITTLE, self._progress)


def _has_numpy(folder: Path) -> bool:
    return any(folder.glob("lib/python*/site-packages/numpy/__init__.py"))


def _requirements_digest(requirements: Path) -> str:
    """A digest of this Python, the requirements, and the files that they name."""
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
        if word and named not in seen and os.path.exists(named):  # False for a word that is no name
            yield word.encode()
            yield from _parts(named, seen)


def _content(file: Path) -> bytes:
    """The bytes of a small file, else its sizes and times."""
    if file.is_file() and file.stat().st_size <= LARGEST_FILE_BYTES:
        return file.read_bytes()
    files = [file] if file.is_file() else list(islice(file.rglob("*"), MOST_FILES))
    found = [
        (str(each.relative_to(file)), each.stat().st_size, each.stat().st_mtime_ns)
        for each in sorted(files)
    ]
    return repr(found).encode()
