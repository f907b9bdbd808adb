"""From a packed environment (conda-pack, venv-pack) to a folder, unpacked once for its content."""

import asyncio
import hashlib
import logging
import os
import stat
import tarfile
import threading
from pathlib import Path

from backends.python.environments.kept_folders import KeptFolders
from gateway.errors import Code, InferenceError
from gateway.threads import apart

log = logging.getLogger("sluice.python")

FOLDER_MODE = 0o755
FILE_MODE = 0o755
"""Without set-user-id bits, and without the right to write for others."""

NO_ARCHIVE = "file could not be opened successfully"


async def unpacked(archive: Path, model: str, kept: KeptFolders) -> Path:
    """The folder with what a tar archive holds, whatever it is compressed with.

    InferenceError if it is no archive, is damaged, or holds anything that would lie elsewhere.
    """
    digest = await apart(_digest, archive)

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
    unpacking = asyncio.create_task(apart(_unpack, archive, folder, stop))
    try:
        await asyncio.shield(unpacking)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([unpacking])
        raise


class _Elsewhere(ValueError):
    """A member of an archive that would not be a file, a folder or a link of its folder."""

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
    """The member with the rights of a file of this user, if it lies in the folder.

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


def _digest(archive: Path) -> str:
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if str(error).startswith(NO_ARCHIVE):  # then come a dozen lines of what else it might have been
        return "it is no tar archive, compressed by gzip, bzip2, xz or not at all"
    return str(error).partition("\n")[0]
