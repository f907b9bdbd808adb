"""How is something slow made once, and found whole by everybody from then on?"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from filelock import AsyncFileLock

from gateway.errors import Code, InferenceError

MARK = ".whole"
"""Written last: a folder without it was left by somebody who did not finish."""

Build = Callable[[Path], Awaitable[None]]


class KeptFolders:
    """Folders by the key of what they are made of, shared by all gateways of a user.

    They are made where they stay, because environments have their own place written into them.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    async def get(self, key: str, build: Build) -> Path:
        """The folder of that key. `build` fills it, if nobody has, while all others wait.

        If `build` fails or is cancelled nothing stays. InferenceError if the disk refuses.
        """
        folder = self._root / key
        if await asyncio.to_thread((folder / MARK).exists):
            return folder  # also where nothing can be written any more, not even a lock
        try:
            await asyncio.to_thread(self._root.mkdir, parents=True, exist_ok=True)
            # Locks are files of their own: the folder itself comes and goes.
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
