"""What has each process of a server used of the processors?"""

from collections import defaultdict
from collections.abc import Mapping

import psutil

from loadtests.server import Server

SERVER = "server"
ENGINE = "engine"
MODULES = {"gateway.processes": "frontends", "backends.vllm.engine_clients": "clients"}
"""What is on the command lines of the gateway's processes besides the server, and their names."""


def spent_secs(server: Server) -> Mapping[str, float]:
    """Seconds since each process was started, added up by what the processes are."""
    first = psutil.Process(server.pid)
    found: defaultdict[str, float] = defaultdict(float)
    for process in (first, *first.children(recursive=True)):
        role = SERVER if process.pid == server.pid else _role(process)
        found[role] += sum(process.cpu_times()[:2])
    return found


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    return next((role for module, role in MODULES.items() if module in words), ENGINE)
