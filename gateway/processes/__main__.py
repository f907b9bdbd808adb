"""python -m gateway.processes FD: one frontend, which the server starts."""

import signal
import socket
import sys

import uvloop

from gateway.processes.frontend import Frontend


async def _run(descriptor: int) -> None:
    await Frontend().run(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    # Whoever ends all processes at once means the server: it lets clients end, and then says so.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(_run(int(sys.argv[1])))
