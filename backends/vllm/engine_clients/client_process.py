"""The process of one client of a shared engine: how it is started, and how it ends."""

import logging
import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from backends.vllm.engine_clients.messages import ClientSettings, write
from backends.vllm.settings import EngineModel
from gateway.python_processes import module_command, module_environment

log = logging.getLogger("sluice.vllm")

MODULE = "backends.vllm.engine_clients"

PROMETHEUS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Where the variable points, values of metrics are kept in files that other processes can read."""


class ClientProcess:
    """Begun where it is made, in any thread; `settings` are what it is to be told first.

    `ends` are the two listeners of vLLM's where the engine looks for this client: they become its
    own. `addresses` are what vLLM tells its clients besides; the file `counters` and the
    `metrics_folder` are theirs in common. `name`, `exitcode` and `sentinel` are for vLLM, which
    gives a start up when one of them ends.
    """

    def __init__(
        self,
        model: EngineModel,
        index: int,
        ends: tuple[Any, Any],
        addresses: Mapping[str, str],
        counters: Path,
        metrics_folder: Path,
    ) -> None:
        self.index = index
        self.name = f"client {index}"
        self.connection, theirs = socket.socketpair()
        self.sentinel = self.connection.fileno()  # it has something to read when the client ends
        listening = (ends[0].socket.fileno(), ends[1].socket.fileno())
        told = {"input_address": ends[0].address, "output_address": ends[1].address, **addresses}
        debug = log.isEnabledFor(logging.DEBUG)
        self.settings = write(ClientSettings(model, index, told, *listening, str(counters), debug))
        arguments = (str(theirs.fileno()), str(os.getpid()))
        with theirs:
            self._process = subprocess.Popen(
                module_command(MODULE, *arguments),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *listening),
                start_new_session=True,  # signals of the terminal are the server's
                env=module_environment(**{PROMETHEUS_FOLDER: str(metrics_folder)}),
            )
        for end in ends:
            end.close()

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def how_it_ended(self) -> str:
        """For messages: its exit status, if that is known."""
        status = self.exitcode
        return "" if status is None else f" (exit code {status})"

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def end(self, within: float) -> None:
        """Wait until it has ended; one that goes on without a connection is killed. Blocks."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
        self._process.kill()
        self._process.wait()
