"""Where does a transport listen: at a TCP port, or at a socket in the file system?"""

import os
import socket
import stat

from gateway.settings import UNIX, GrpcSettings

EVERY_ADDRESS = "::"
"""Of IPv6, and of IPv4 with it."""


def unix_path(address: str) -> str:
    """The path in an address such as `unix:/run/sluice`; "" if it is of TCP."""
    return address.removeprefix(UNIX) if address.startswith(UNIX) else ""


def bound(settings: GrpcSettings) -> socket.socket:
    """A socket that listens; OSError that says why the address cannot be had.

    A Unix socket at which nobody listens any more is replaced.
    """
    path = unix_path(settings.address)
    if path:
        _clear(path)
        return _unix(path)
    return _tcp(settings)


def require_free(settings: GrpcSettings) -> None:
    """Raise the same OSError, and let the address go; gRPC only logs why, in its own form."""
    bound(settings).close()
    path = unix_path(settings.address)
    if path:
        os.unlink(path)


class OwnPath:
    """A Unix socket in the file system, as it was when it was made."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._made = _identity(path)

    def remove(self) -> None:
        """Take it out of the file system, unless somebody has put another one there."""
        try:
            if _identity(self._path) == self._made:
                os.unlink(self._path)
        except FileNotFoundError:
            return


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _tcp(settings: GrpcSettings) -> socket.socket:
    address, port = settings.address, settings.port
    try:
        return socket.create_server(
            (address, port),
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            reuse_port=settings.reuse_port,
            dualstack_ipv6=address == EVERY_ADDRESS and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        # What Python adds to the reason is said before it here.
        why = (error.strerror or str(error)).partition(" (while")[0]
        raise OSError(f"port {port} of {address} cannot be had: {why}") from None


def _unix(path: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    try:
        found.bind(path)
        found.listen()
    except OSError as error:
        found.close()
        raise _refused(path, error.strerror or str(error)) from None
    return found


def _clear(path: str) -> None:
    """Remove what a server has left that did not end well."""
    try:
        kind = os.lstat(path).st_mode
    except OSError:
        return  # binding says what is the matter, if anything is
    if not stat.S_ISSOCK(kind):
        raise _refused(path, "there is something else than a socket; remove it")
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
            return True  # so many ask that they have to wait
    return True


def _refused(path: str, why: str) -> OSError:
    return OSError(f"{UNIX}{path} cannot be had: {why}")
