"""The processes of an engine that has several clients, none of which has started it."""

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.v1.engine.admission_control import SharedAdmissionStats
from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
from vllm.v1.executor.abstract import Executor

from backends.vllm.engine import own_engine_config
from backends.vllm.engine_clients.remote_client import ClientProcess
from backends.vllm.orphans import ErrorSender
from backends.vllm.settings import EngineModel
from gateway.private_folder import PrivateFolder

EXIT_SECS = 5.0
"""So long clients may take to end when their connections have ended, before they are killed."""

SUPERVISOR = -1
"""The rank of a process that starts an engine and is none of its clients."""


class SharedEngine:
    """An engine, and the processes that are its clients; made in a thread, for it blocks.

    `processes` are the engine's. `metrics_folder` is where the clients keep the values of their
    metrics, for whoever adds them up.
    """

    def __init__(self, model: EngineModel, errors: ErrorSender) -> None:
        self.clients: list[ClientProcess] = []
        self.processes: list[Any] = []
        self._folder = PrivateFolder.make("sluice-metrics-")
        self.metrics_folder = self._folder.path
        self._ends: list[Callable[[], object]] = []
        try:
            self._launch(model, errors)
        except BaseException:
            for client in self.clients:
                client.kill()
            self.stop()
            raise

    def stop(self) -> None:
        """End the engine, and wait for its clients, whose connections have ended; blocks."""
        ends_at = time.monotonic() + EXIT_SECS
        for client in self.clients:
            client.end(max(0.0, ends_at - time.monotonic()))
        for end in self._ends:
            with suppress(OSError):
                end()
        self._folder.remove()

    def _launch(self, model: EngineModel, errors: ErrorSender) -> None:
        """Start all, and wait until the engine is ready, as `vllm serve` does it for its own."""
        counters = self.metrics_folder / "requests"
        write_counters(counters, model.clients)
        all_cores = os.sched_getaffinity(0) if model.cpu_cores else set()
        counted = {"_api_process_count": model.clients, "_api_process_rank": SUPERVISOR}
        arguments, config = own_engine_config(model, errors, **counted)
        listeners = bind_engine_zmq_listeners(config, model.clients)
        self._ends.append(listeners.cleanup)
        with launch_core_engines(
            config,
            Executor.get_class(config),
            not arguments.disable_log_stats,
            listeners.addresses,
        ) as launched:
            told = self._keep(launched)
            if all_cores:
                # The engine's processes have been started: its cores are for them alone.
                os.sched_setaffinity(0, all_cores)
            launched.watched_frontend_processes = self.clients
            for index, ends in enumerate(zip(listeners.inputs, listeners.outputs, strict=True)):
                client = ClientProcess(model, index, ends, told, counters, self.metrics_folder)
                self.clients.append(client)

    def _keep(self, launched: Any) -> dict[str, str]:
        """Remember what is to be ended; what the clients are to be told of it."""
        self.processes = list(getattr(launched.engine_manager, "processes", ()))
        if launched.engine_manager is not None:
            self._ends.insert(0, launched.engine_manager.shutdown)
        if launched.coordinator is None:
            return {}
        self.processes.append(launched.coordinator.proc)
        self._ends.insert(1, launched.coordinator.shutdown)
        return {"stats_update_address": launched.coordinator.get_stats_publish_address()}


def write_counters(file: Path, clients: int) -> None:
    """Make the file: nobody has a request."""
    size = SharedAdmissionStats.num_counters(clients) * SharedAdmissionStats.COUNTER_BYTES
    file.write_bytes(bytes(size))


def shared_counters(file: Path) -> memoryview:
    """The counters of a file, for this process and for those that share it."""
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
