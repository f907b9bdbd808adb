"""Entry point of a frontend process: `python -m gateway.processes FD`, run by the server."""

import signal
import socket
import sys

import uvloop

from gateway.process_limits import collect_garbage_rarely


async def _run(descriptor: int) -> None:
    from gateway.processes.frontend import Frontend

    await Frontend().run(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    # A signal to the process group is for the server, which drains and then stops its frontends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collect_garbage_rarely()  # before most of the imports
    uvloop.run(_run(int(sys.argv[1])))
