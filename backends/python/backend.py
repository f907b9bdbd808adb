"""The backend `python`: programs (`model.py`), each instance in a worker process of its own."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

from backends.python.business_logic import BusinessLogic, LoadCycles, ModelManagement, NoOtherModels
from backends.python.codec import RequestEncoder
from backends.python.connection import WorkerConnection
from backends.python.environments import Places, WorkerEnvironment, interpreter
from backends.python.executions import WorkerExecutions
from backends.python.instance import PythonInstance, RunningWorker, Services
from backends.python.loading import (
    WorkerLimits,
    code_identity,
    complete_message,
    completed_config,
    instance_name,
    load_message,
    refuse_special_name,
    stub_timeout_secs,
    version_of,
)
from backends.python.metrics import MetricCalls, MetricStore
from backends.python.quarantine import Quarantine
from backends.python.services import LogLines, LogOnly, ServicesOfServer
from backends.python.worker.sluice_worker.protocol import ToGateway, ToWorker
from backends.python.worker_process import WorkerProcess
from gateway.backend import Backend, Instance, ModelContext
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.threads import apart

log = logging.getLogger("sluice.python")

REMIND_SECS = 30.0
"""Interval of the log line for a model that is still initializing."""
COMPLETE_SECS = 120.0
"""Longest `auto_complete_config`; no other limit ends it when the server stops."""


class PythonBackend(Backend):
    """Starts a worker for each instance, and a short-lived one to complete a configuration."""

    loads_side_by_side = True
    keeps_to_cores = True

    def __init__(self) -> None:
        self._metrics = MetricStore()
        self._quarantine = Quarantine()
        self._load_cycles = LoadCycles()

    async def prepare(self, config: ModelConfig, path: Path) -> None:
        await self._environment(config, path)

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return asyncio.run(self._complete(config, path))

    async def load(self, context: ModelContext) -> Instance:
        config, name = context.config, instance_name(context)
        parameters = WorkerLimits.read(config)
        code = await apart(code_identity, config, context.path, self.home)
        services = partial(self._services, context)
        suspect = partial(self._quarantine.died, code)
        worker = await self._start(config, context.path, name, services, suspect)
        try:
            worker.keep_to(context.cpu_cores)
            message = [ToWorker.LOAD, load_message(context, self.home)]
            with self._load_cycles.of(config.name):
                loaded = await _initialized(worker, message, parameters.initialize_timeout_secs)
        except BaseException:
            await worker.stop()
            raise
        worker.watch(parameters)
        return PythonInstance(
            worker, self._quarantine, code, checks_readiness=loaded["checks_readiness"]
        )

    def for_program(self, owner: Backend, home: Path) -> "PythonBackend":
        """A copy for the program in `home`, with the settings of the backend that it is part of."""
        found = copy(self)
        found.settings, found.kept, found.home = owner.settings, owner.kept, home
        return found

    async def _complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        name = config.name
        limit_secs = WorkerLimits.read(config).initialize_timeout_secs or COMPLETE_SECS
        limit_secs = min(limit_secs, COMPLETE_SECS)
        worker = await self._start(config, path, name, _log_only)
        try:
            message = [ToWorker.COMPLETE, complete_message(config, path, self.home)]
            async with asyncio.timeout(limit_secs):
                _, completed = await worker.ask(message, ToGateway.COMPLETED)
        except TimeoutError:
            raise InferenceError(
                Code.INTERNAL,
                f"auto_complete_config function in model '{config.name}' did not return within "
                f"{limit_secs:g} s",
            ) from None
        finally:
            await worker.stop()
        return completed_config(config, completed)

    async def _start(
        self,
        config: ModelConfig,
        path: Path,
        name: str,
        services: Callable[[WorkerConnection, WorkerExecutions], Services],
        on_death: Callable[[Sequence[InferRequest]], None] = lambda _: None,
    ) -> RunningWorker:
        refuse_special_name(name)
        limit_secs, parameters = stub_timeout_secs(self.settings), WorkerLimits.read(config)
        process = await _started(config.name, await self._environment(config, path))
        encoder = RequestEncoder(config, version_of(path))
        worker = RunningWorker(process, name, encoder, services, on_death)
        try:
            if parameters.worker_memory_limit_mb:
                process.limit_memory(parameters.worker_memory_limit_mb)
            await worker.started(limit_secs)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def _environment(self, config: ModelConfig, path: Path) -> WorkerEnvironment:
        return await interpreter(config, Places(version=path, backend=self.home, kept=self.kept))

    def _services(
        self, context: ModelContext, link: WorkerConnection, executions: WorkerExecutions
    ) -> Services:
        control = context.control or NoOtherModels()
        about = {"model": context.config.name, "instance": instance_name(context)}
        return ServicesOfServer(
            link,
            executions,
            LogLines(about),
            MetricCalls(link.control, self._metrics),
            BusinessLogic(link, context.infer, control, executions.is_abandoned),
            ModelManagement(link.control, control, context.config.name, self._load_cycles),
        )


async def _initialized(worker: RunningWorker, message: Sequence[Any], limit_secs: float) -> Any:
    """The content of LOADED; a long wait is logged."""
    asking = asyncio.ensure_future(worker.ask(message, ToGateway.LOADED))
    try:
        async with asyncio.timeout(limit_secs or None):
            while not (await asyncio.wait([asking], timeout=REMIND_SECS))[0]:
                log.warning("model still initializing", extra=worker.about)
            return asking.result()[1]
    except TimeoutError:
        raise InferenceError(
            Code.INTERNAL,
            f"'{worker.name}' did not initialize within {limit_secs:g} s (initialize_timeout_secs)",
        ) from None
    finally:
        asking.cancel()


async def _started(model: str, environment: WorkerEnvironment) -> WorkerProcess:
    """A started process; discarded if this is cancelled meanwhile."""
    starting = asyncio.get_running_loop().run_in_executor(
        None, WorkerProcess.start, environment.python, environment.variables
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_discard)
        raise
    except OSError as error:
        raise InferenceError(
            Code.INTERNAL, f"the worker of model '{model}' cannot be started: {error.strerror}"
        ) from None


def _log_only(_: WorkerConnection, executions: WorkerExecutions) -> Services:
    return LogOnly(LogLines({"model": executions.model}))


def _discard(starting: asyncio.Future[WorkerProcess]) -> None:
    if starting.exception() is None:
        starting.result().discard()
