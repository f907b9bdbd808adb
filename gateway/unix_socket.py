"""Unix sockets that servers listen on: their paths, modes and files."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.settings import UNIX

OWNER_ONLY = 0o600
"""The mode of a socket to which only processes of the server's user connect (unix(7))."""


def unix_path(address: str) -> str:
    """The path in an address such as `unix:/run/sluice`; "" for TCP."""
    return address.removeprefix(UNIX) if address.startswith(UNIX) else ""


def listening_socket(path: str, mode: int | None = None) -> socket.socket:
    """A listening socket; OSError with the path and the reason if binding fails.

    A stale socket, without a listener, is replaced. Without a `mode` its mode is that of the umask.
    """
    _clear(path)
    found = socket.socket(socket.AF_UNIX)
    try:
        found.bind(path)
        if mode is not None:
            os.chmod(path, mode)  # before `listen`, since a connected client stays
        found.listen()
    except OSError as error:
        found.close()
        raise _refused(path, error.strerror or str(error)) from None
    return found


@contextmanager
def created_with(mode: int | None) -> Iterator[None]:
    """Inside this block a library creates a socket with that mode; None is that of the umask."""
    if mode is None:
        yield
        return
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)


class SocketFile:
    """A Unix socket in the file system, identified by its inode."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity = _identity(path)

    def remove(self) -> None:
        """Remove the socket, unless another one has replaced it."""
        try:
            if _identity(self._path) == self._identity:
                os.unlink(self._path)
        except FileNotFoundError:
            return


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _clear(path: str) -> None:
    """Remove the stale socket of a server that did not shut down."""
    try:
        kind = os.lstat(path).st_mode
    except OSError:
        return  # binding reports the error, if any
    if not stat.S_ISSOCK(kind):
        raise _refused(path, "the path exists and is not a socket; remove it")
    if _is_served(path):
        raise _refused(path, "Address already in use")
    os.unlink(path)


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True  # the backlog of a listener is full
    return True


def _refused(path: str, why: str) -> OSError:
    return OSError(f"cannot listen on {UNIX}{path}: {why}")
