"""From a packed environment (conda-pack, venv-pack) to a folder, unpacked once for its content."""

import asyncio
import hashlib
import logging
import tarfile
import threading
from pathlib import Path

from backends.python.environments.kept_folders import KeptFolders
from gateway.errors import Code, InferenceError

log = logging.getLogger("sluice.python")

NO_ARCHIVE = "file could not be opened successfully"


async def unpacked(archive: Path, model: str, kept: KeptFolders) -> Path:
    """The folder with what a tar archive holds, whatever it is compressed with.

    InferenceError if it is no archive, is damaged, or holds anything that would lie elsewhere.
    """
    digest = await asyncio.to_thread(_digest, archive)

    async def build(folder: Path) -> None:
        log.info("unpacking environment", extra={"model": model, "of": archive.name})
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
    """Unpack in a thread, which has ended when this ends, cancelled or not."""
    stop = threading.Event()
    unpacking = asyncio.create_task(asyncio.to_thread(_unpack, archive, folder, stop))
    try:
        await asyncio.shield(unpacking)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([unpacking])
        raise


def _unpack(archive: Path, folder: Path, stop: threading.Event) -> None:
    def check(member: tarfile.TarInfo, destination: str) -> tarfile.TarInfo | None:
        if stop.is_set():
            raise tarfile.ExtractError("nobody waits for it any more")
        return _checked(member, destination)

    with tarfile.open(archive) as packed:
        packed.errorlevel = 2
        packed.extractall(folder, filter=check)


def _checked(member: tarfile.TarInfo, destination: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(member, destination)
    except (tarfile.AbsoluteLinkError, tarfile.LinkOutsideDestinationError):
        if not member.issym():
            raise
        # bin/python of a packed venv points at the system's. Nothing is written through a link:
        # names are checked against where they lead when their turn comes.
        return tarfile.tar_filter(member, destination)


def _digest(archive: Path) -> str:
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _reason(error: Exception) -> str:
    if isinstance(error, tarfile.FilterError):
        return f"'{error.tarinfo.name}' would not lie inside it"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if str(error).startswith(NO_ARCHIVE):  # then come a dozen lines of what else it might have been
        return "it is no tar archive, compressed by gzip, bzip2, xz or not at all"
    return str(error).partition("\n")[0]
