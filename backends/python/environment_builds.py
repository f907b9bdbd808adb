"""Environments unpacked or installed once per content (python backend, execution environments)."""

import asyncio
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import sys
import tarfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from itertools import islice
from pathlib import Path

from filelock import AsyncFileLock

from backends.python.environment_commands import BuildProgress, CommandError, run
from gateway.errors import Code, InferenceError
from gateway.threads import apart

MARK = ".whole"
"""Written last: a folder without it is incomplete."""

Build = Callable[[Path], Awaitable[None]]


class KeptFolders:
    """Folders by a key of their content, shared by all gateways of a user.

    They are made in their final place, because environments contain their own path.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    async def get(self, key: str, build: Build) -> Path:
        """The folder of that key. If it is missing, `build` fills it while other gateways wait.

        If `build` fails or is cancelled the folder is removed. UNAVAILABLE on an error of the disk.
        """
        folder = self._root / key
        if await asyncio.to_thread((folder / MARK).exists):
            return folder  # also on a disk that is read-only, even for a lock
        try:
            await asyncio.to_thread(self._root.mkdir, parents=True, exist_ok=True)
            # The lock is a file of its own, since the folder itself is removed and made.
            async with AsyncFileLock(self._root / f"{key}.lock", thread_local=False):
                if not (folder / MARK).exists():
                    await self._make(folder, build)
        except OSError as error:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"the folder of environments beside the stored models cannot be used: "
                f"{error.strerror or type(error).__name__}",
            ) from error
        return folder

    async def _make(self, folder: Path, build: Build) -> None:
        await _remove(folder)
        await asyncio.to_thread(folder.mkdir)
        try:
            await build(folder)
        except BaseException:
            await _remove(folder)
            raise
        (folder / MARK).touch()


async def _remove(folder: Path) -> None:
    await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


log = logging.getLogger("sluice.python")

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
