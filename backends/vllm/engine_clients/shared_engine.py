"""The processes of an engine with several clients, and the clients as the server sees them."""

import asyncio
import logging
import mmap
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.v1.engine.admission_control import SharedAdmissionStats
from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
from vllm.v1.executor.abstract import Executor

from backends.vllm.engine import own_engine_config
from backends.vllm.engine_clients.messages import (
    ClientKind,
    ClientSettings,
    Offer,
    read_offer,
    relay,
    write,
)
from backends.vllm.settings import EngineModel
from backends.vllm.start_reports import StartReporter
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.private_folder import PrivateFolder
from gateway.processes.channel import (
    NO_CALL,
    Channel,
    Frame,
    Receiver,
    call_numbers,
    read_number,
)
from gateway.processes.error_messages import read_error
from gateway.processes.inference_calls import (
    InferenceKind,
    RequestingEnd,
    request_payload,
    tokens,
)
from gateway.processes.module_commands import module_command, module_environment

log = logging.getLogger("sluice.vllm")

ANSWER_TIMEOUT_SECS = 60.0
"""A client that sends no frame for this time is killed; long texts take a while."""

EXIT_STATUS_SECS = 0.1
"""Time from the disconnect of a process to its exit status."""

MODULE = "backends.vllm.engine_clients"

PROMETHEUS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable with the folder of metric values that other processes read."""

EXIT_SECS = 5.0
"""Time for clients to exit after their connections are closed; then they are killed."""

SUPERVISOR = -1
"""The rank of a process that starts an engine and is not its client."""


class ClientProcess:
    """The process of a client, started by the constructor in any thread.

    `settings` is its first message. `ends` are vLLM's two listeners for this client, which it
    takes over; `addresses` are vLLM's further addresses. The file `counters` and the
    `metrics_folder` are shared by all clients. vLLM reads `name`, `exitcode` and `sentinel`, and
    aborts a start if a client exits.
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
        self.sentinel = self.connection.fileno()  # readable when the client exits
        listening = (ends[0].socket.fileno(), ends[1].socket.fileno())
        reachable = {
            "input_address": ends[0].address,
            "output_address": ends[1].address,
            **addresses,
        }
        debug = log.isEnabledFor(logging.DEBUG)
        self.settings = write(
            ClientSettings(model, index, reachable, *listening, str(counters), debug)
        )
        arguments = (str(theirs.fileno()), str(os.getpid()))
        with theirs:
            self._process = subprocess.Popen(
                module_command(MODULE, *arguments),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *listening),
                start_new_session=True,  # signals of the terminal reach the server only
                env=module_environment(**{PROMETHEUS_FOLDER: str(metrics_folder)}),
            )
        for end in ends:
            end.close()

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    @property
    def exit_text(self) -> str:
        """The exit status for messages, if it is known."""
        status = self.exitcode
        return "" if status is None else f" (exit code {status})"

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def end(self, within: float) -> None:
        """Close the connection, and kill the process if it does not exit in time; blocks."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
        self._process.kill()
        self._process.wait()


class RemoteClient(Receiver):
    """The connection to a client, on one event loop; `calls` is its number of open calls.

    `wasted` is called with numbers of tokens of cancelled requests, `stopped` with the reason when
    the client or the engine stops.
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
        """Connect, and wait until the client is ready; InferenceError if it fails."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._channel, sock=self._process.connection)
        self._channel.join(NO_CALL, self)
        self._channel.send(ClientKind.SETTINGS, NO_CALL, self._process.settings)
        offer = await self._offer
        self._timer = loop.call_later(ANSWER_TIMEOUT_SECS, self._check)
        return offer

    def call(self, request: InferRequest) -> RequestingEnd:
        """Send a request; `returned` must follow."""
        number, payload = next(self._numbers), request_payload(request)
        self._channel.send(InferenceKind.REQUEST, number, payload)
        call = RequestingEnd(self._channel, number, f"model '{request.model}': its engine")
        self.calls += 1
        return call

    def returned(self, call: RequestingEnd) -> None:
        """End a call."""
        self.calls -= 1
        if unread := call.leave():
            self._wasted(unread)

    def close(self) -> None:
        """Close the connection, so that the process exits."""
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
        """Send a PING; kill the client if it has sent no frame since the last check."""
        if self._has_answered:
            self._has_answered = False
            self._channel.send(ClientKind.PING)
            self._timer = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_SECS, self._check)
            return
        about = {"model": self._model, "client": self._process.index, "secs": ANSWER_TIMEOUT_SECS}
        log.error("engine client killed: no answer", extra=about)
        self._process.kill()

    def _waste(self, frame: Frame) -> None:
        """Count the tokens of a late frame of an ended call."""
        if late := tokens(frame):
            self._wasted(late)


class SharedEngine:
    """An engine and its client processes; the constructor blocks, so it runs in a thread.

    `processes` are the engine's. `metrics_folder` has the metric values of the clients.
    """

    def __init__(self, model: EngineModel, reporter: StartReporter) -> None:
        self.clients: list[ClientProcess] = []
        self.processes: list[Any] = []
        self._folder = PrivateFolder.make("sluice-metrics-")
        self.metrics_folder = self._folder.path
        self._ends: list[Callable[[], object]] = []
        try:
            self._launch(model, reporter)
        except BaseException:
            for client in self.clients:
                client.kill()
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the clients and the engine; blocks."""
        ends_at = time.monotonic() + EXIT_SECS
        for client in self.clients:
            client.end(max(0.0, ends_at - time.monotonic()))
        for end in self._ends:
            with suppress(OSError):
                end()
        self._folder.remove()

    def _launch(self, model: EngineModel, reporter: StartReporter) -> None:
        """Start all processes, and wait until the engine is ready, as `vllm serve` does."""
        counters = self.metrics_folder / "requests"
        write_counters(counters, model.clients)
        all_cores = os.sched_getaffinity(0) if model.cpu_cores else set()
        counted = {"_api_process_count": model.clients, "_api_process_rank": SUPERVISOR}
        arguments, config = own_engine_config(model, reporter, **counted)
        listeners = bind_engine_zmq_listeners(config, model.clients)
        self._ends.append(listeners.cleanup)
        with launch_core_engines(
            config,
            Executor.get_class(config),
            not arguments.disable_log_stats,
            listeners.addresses,
        ) as launched:
            addresses = self._keep(launched)
            if all_cores:
                # The engine's processes are started: only they stay on its cores.
                os.sched_setaffinity(0, all_cores)
            launched.watched_frontend_processes = self.clients
            for index, ends in enumerate(zip(listeners.inputs, listeners.outputs, strict=True)):
                client = ClientProcess(model, index, ends, addresses, counters, self.metrics_folder)
                self.clients.append(client)

    def _keep(self, launched: Any) -> dict[str, str]:
        """Keep the launched processes for `stop`; returns further addresses for the clients."""
        self.processes = list(getattr(launched.engine_manager, "processes", ()))
        if launched.engine_manager is not None:
            self._ends.insert(0, launched.engine_manager.shutdown)
        if launched.coordinator is None:
            return {}
        self.processes.append(launched.coordinator.proc)
        self._ends.insert(1, launched.coordinator.shutdown)
        return {"stats_update_address": launched.coordinator.get_stats_publish_address()}


def write_counters(file: Path, clients: int) -> None:
    """Write the file with zeros.

    vLLM's limit of waiting requests (`max_num_queued_reqs`) applies to all clients together, so
    they share their counters.
    """
    size = SharedAdmissionStats.num_counters(clients) * SharedAdmissionStats.COUNTER_BYTES
    file.write_bytes(bytes(size))


def shared_counters(file: Path) -> memoryview:
    """The counters in the file, shared with other processes."""
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
