"""Are the ports free that `sluice serve` takes?"""

import errno
import socket
from collections.abc import Iterator

from gateway.settings import Settings
from gateway.tools.doctor.finding import Finding, Verdict


def findings() -> Iterator[Finding]:
    """The default port of each listener."""
    settings = Settings()
    for name in ("http", "grpc", "metrics"):
        listener = getattr(settings, name)
        yield port(name, listener.address, listener.port)


def port(name: str, address: str, number: int) -> Finding:
    """Whether the listener `name` could have that port now."""
    what = f"{name} port {number}"
    fix = f"stop what listens there (ss -ltnp), or --{name}-port N"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # As servers do: connections of one that has just ended are not in the way.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, number))
            listener.listen()
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            text = "taken" if taken else f"cannot be had: {error.strerror}"
            return Finding(what, text, Verdict.WARNING, fix)
    return Finding(what, "free")
