"""python -m gateway.frontend_processes FD: one frontend, which the server starts."""

import socket
import sys

import uvloop

from gateway.frontend_processes.frontend import Frontend


async def _run(descriptor: int) -> None:
    await Frontend().run(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    uvloop.run(_run(int(sys.argv[1])))
