"""The processes of an engine with several clients, which the server starts."""

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
"""Time for clients to exit after their connections are closed; then they are killed."""

SUPERVISOR = -1
"""The rank of a process that starts an engine and is not its client."""


class SharedEngine:
    """An engine and its client processes; the constructor blocks, so it runs in a thread.

    `processes` are the engine's. `metrics_folder` has the metric values of the clients.
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
        """Stop the clients and the engine; blocks."""
        ends_at = time.monotonic() + EXIT_SECS
        for client in self.clients:
            client.end(max(0.0, ends_at - time.monotonic()))
        for end in self._ends:
            with suppress(OSError):
                end()
        self._folder.remove()

    def _launch(self, model: EngineModel, errors: ErrorSender) -> None:
        """Start all processes, and wait until the engine is ready, as `vllm serve` does."""
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
