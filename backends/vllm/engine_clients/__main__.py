"""python -m backends.vllm.engine_clients FD SERVER: one client of an engine.

SERVER is the id of its parent, which may exit before this process can ask for it.
"""

import os
import signal
import socket
import sys

import uvloop

from backends.vllm.engine_processes import follow
from gateway.process_limits import collect_garbage_rarely


async def _run(descriptor: int) -> None:
    # The import of vLLM takes seconds, in which the server may exit.
    from backends.vllm.engine_clients.client import EngineClient

    await EngineClient().run(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    # A signal to the whole process group is for the server, which drains requests first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow(int(sys.argv[2]))
    collect_garbage_rarely()
    uvloop.run(_run(int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter would need seconds to finalize vLLM's modules.
    os._exit(0)
