"""One client of a shared engine as the server sees it: who answers requests."""

import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from backends.vllm.engine_clients.call import EngineCall, tokens
from backends.vllm.engine_clients.messages import (
    ClientKind,
    ClientSettings,
    Offer,
    read_error,
    read_offer,
    relay,
    write,
)
from backends.vllm.settings import EngineModel
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.processes.channel import Channel, Receiver
from gateway.processes.frames import NO_CALL, Frame, call_numbers, read_number
from gateway.python_processes import module_command, module_environment

log = logging.getLogger("sluice.vllm")

ANSWER_TIMEOUT_SECS = 60.0
"""A client that has answered nothing for so long hangs, and is killed; texts are long, at times."""

EXIT_STATUS_SECS = 0.1
"""How long a process may take to end once it has ended its connection: then it is known how."""

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
    def exit_text(self) -> str:
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


class RemoteClient(Receiver):
    """Talks to a process, on one event loop; it has so many `calls` at this moment.

    `wasted` is told tokens that were made for nobody, `stopped` why there will be no more answers.
    """

    def __init__(
        self,
        model: str,
        process: ClientProcess,
        wasted: Callable[[int], None],
        stopped: Callable[[str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.calls = 0
        self._model = model
        self._process = process
        self._wasted = wasted
        self._stopped = stopped
        self._numbers = call_numbers()
        self._channel = Channel(self._waste)
        self._offer: asyncio.Future[Offer] = loop.create_future()
        self._has_answered = False
        self._timer: asyncio.TimerHandle | None = None

    async def offer(self) -> Offer:
        """Connect, and wait until it serves; what it offers. InferenceError says why it cannot."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._channel, sock=self._process.connection)
        self._channel.join(NO_CALL, self)
        self._channel.send(ClientKind.SETTINGS, NO_CALL, self._process.settings)
        offer = await self._offer
        self._timer = loop.call_later(ANSWER_TIMEOUT_SECS, self._check)
        return offer

    def call(self, request: InferRequest) -> EngineCall:
        """Hand it a request; `returned` must follow."""
        call = EngineCall(self._channel, next(self._numbers), request)
        self.calls += 1
        return call

    def returned(self, call: EngineCall) -> None:
        """Nobody waits for what is left of a call."""
        self.calls -= 1
        if unread := call.leave():
            self._wasted(unread)

    def close(self) -> None:
        """End the connection, and so the process; nobody waits for an offer any more."""
        self._offer.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._channel.leave(NO_CALL)
        self._channel.close()

    def hear(self, frame: Frame) -> None:
        self._has_answered = True
        if frame.kind == ClientKind.READY:
            self._offer.set_result(read_offer(frame.payload))
        elif frame.kind == ClientKind.FAILED:
            self._offer.set_exception(read_error(frame.payload))
        elif frame.kind == ClientKind.WASTED:
            self._wasted(read_number(frame.payload))
        elif frame.kind == ClientKind.LOG:
            relay(frame.payload)
        elif frame.kind == ClientKind.STOPPED:
            self._end(frame.payload.decode())

    def lose(self) -> None:
        asyncio.get_running_loop().call_later(EXIT_STATUS_SECS, self._lost)

    def _lost(self) -> None:
        self._end(f"client {self._process.index} of its engine ended{self._process.exit_text}")

    def _end(self, why: str) -> None:
        if not self._offer.done():
            reason = f"model '{self._model}': {why}; the log says more"
            self._offer.set_exception(InferenceError(Code.INTERNAL, reason))
        self._stopped(why)

    def _check(self) -> None:
        """Ask whether it still answers, and kill it if it has said nothing since the last time."""
        if self._has_answered:
            self._has_answered = False
            self._channel.send(ClientKind.PING)
            self._timer = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_SECS, self._check)
            return
        about = {"model": self._model, "client": self._process.index, "secs": ANSWER_TIMEOUT_SECS}
        log.error("client of an engine hangs, and is killed", extra=about)
        self._process.kill()

    def _waste(self, frame: Frame) -> None:
        """What still comes of a call that has been left."""
        if late := tokens(frame):
            self._wasted(late)
