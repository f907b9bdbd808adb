"""Builds of environments: folders kept for all gateways of a user, commands with progress."""

import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from filelock import AsyncFileLock

from gateway.errors import Code, InferenceError
from gateway.threads import apart

log = logging.getLogger("sluice.python")

LOG_EVERY_SECS = 3.0
QUICK_SECS = 60.0
LAST_LINES = 8
LINE_LENGTH = 300
NO_PATHS_OF_OURS = {"PYTHONPATH": "", "PYTHONHOME": ""}
"""Variables that keep the gateway's own packages out of another interpreter."""

# A path of this host, as a word or a file URL; the addresses of indexes are no paths.
_PATHS = re.compile(r"(?:file:/+|(?<![\w:/.]))/?(?:[\w.+@~-]*/){2,}([\w.+@~-]*)")
_URLS = re.compile(r"\b(?!file:)[a-z][a-z+]*://\S+")

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
                f"the folder of environments next to the stored models cannot be used: "
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


class CommandError(Exception):
    """A command failed; the text is the end of its output, without paths of the host."""


@dataclass(slots=True)
class BuildProgress:
    """Progress of several commands, logged every few seconds.

    `about` are the fields of its lines.
    """

    about: Mapping[str, str]
    began: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    def step(self, says: str) -> None:
        """Log the current step, if the last line is old enough."""
        now = time.monotonic()
        if now - self.last < LOG_EVERY_SECS:
            return
        self.last = now
        elapsed = {"elapsed_secs": round(now - self.began), "says": without_paths(says)}
        log.info("environment build in progress", extra={**self.about, **elapsed})

    def end(self) -> None:
        """Log the end."""
        secs = round(time.monotonic() - self.began, 1)
        log.info("environment built", extra={**self.about, "secs": secs})


@dataclass(slots=True)
class _Output:
    """The output of a command: its last lines, and the beginning of the next one."""

    rest: str = ""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def feed(self, data: bytes) -> None:
        """Add output; a line without end is cut."""
        *lines, rest = (self.rest + data.decode(errors="replace")).split("\n")
        self.rest = rest[:LINE_LENGTH]
        self.lines.extend(line.rstrip()[:LINE_LENGTH] for line in lines if line.strip())

    @property
    def reason(self) -> str:
        """The lines of errors, else the last lines."""
        lines = [*self.lines, *([self.rest] if self.rest else [])]
        errors = [line for line in lines if line.lower().startswith("error")]
        return "; ".join(without_paths(line.strip()) for line in errors or lines[-3:])


async def run(
    command: Sequence[str | Path],
    folder: Path,
    environment: Mapping[str, str],
    progress: BuildProgress,
) -> None:
    """Run a command in a folder until it ends.

    CommandError for a status other than 0. If this is cancelled, the command and all its
    processes are killed.
    """
    output = _Output()
    with _started(command, folder, environment, subprocess.STDOUT) as process:
        async with _reading(process.stdout) as said:
            while not said.at_eof():
                await _feed(said, output)
                progress.step(output.lines[-1] if output.lines else _shown(command))
        status = await apart(process.wait)
    if status:
        raise CommandError(output.reason or f"it ended with status {status}")


async def output(command: Sequence[str | Path], folder: Path) -> str:
    """The output of a short command in a folder; CommandError if it fails or takes too long."""
    try:
        with _started(command, folder, {}, subprocess.PIPE) as process:
            async with (
                asyncio.timeout(QUICK_SECS),
                _reading(process.stdout) as saying,
                _reading(process.stderr) as complaining,
            ):
                said, complained = await asyncio.gather(saying.read(), complaining.read())
            status = await apart(process.wait)
    except TimeoutError:
        raise CommandError(f"it takes more than {QUICK_SECS:g} s") from None
    if status:
        lines = complained.decode(errors="replace").strip().splitlines()
        raise CommandError(without_paths(lines[-1]) if lines else f"status {status}")
    return said.decode(errors="replace")


@contextmanager
def _started(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], errors: int
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process; at the end of the block it is killed with all that it started.

    By `subprocess`: event loops fork first, and gRPC's fork handlers may crash the child of a
    process with threads.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env={**os.environ, **NO_PATHS_OF_OURS, **environment},
            start_new_session=True,  # a group of its own, to be killed whole
        )
    except OSError as error:
        name = Path(command[0]).name
        raise CommandError(f"'{name}' cannot be started: {error.strerror}") from None
    try:
        yield process
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@asynccontextmanager
async def _reading(pipe: IO[bytes] | None) -> AsyncIterator[asyncio.StreamReader]:
    """A reader of a pipe, which is closed at the end of the block."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield reader
    finally:
        transport.close()


async def _feed(said: asyncio.StreamReader, output: _Output) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LOG_EVERY_SECS):
            output.feed(await said.read(1 << 16))


def _shown(command: Sequence[str | Path]) -> str:
    return " ".join(str(each) for each in command)


def without_paths(line: str) -> str:
    """The line with every path of this host cut to its last part; addresses stay."""
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found.group())
        return f"\0{len(kept) - 1}\0"

    line = _PATHS.sub(r"\1", _URLS.sub(keep, line))
    return re.sub("\0(\\d+)\0", lambda found: kept[int(found.group(1))], line)
