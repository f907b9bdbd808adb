"""python -m backends.vllm.engine_clients FD SERVER: one client of an engine.

SERVER is the process that starts it: it may be gone before this one can ask for its parent.
"""

import os
import signal
import socket
import sys

import uvloop

from backends.vllm.orphans import follow


async def _run(descriptor: int) -> None:
    # It takes seconds to import all of vLLM, and the server may end meanwhile.
    from backends.vllm.engine_clients.client import EngineClient

    await EngineClient().run(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    # Whoever ends all processes at once means the server: it lets requests end first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow(int(sys.argv[2]))
    uvloop.run(_run(int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    # All has ended; to take vLLM's modules apart would take the interpreter seconds.
    os._exit(0)
