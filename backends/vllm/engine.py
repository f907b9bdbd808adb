"""Start and stop of vLLM's engines."""

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from functools import partial
from multiprocessing.process import BaseProcess
from traceback import walk_tb
from typing import Any, TypeVar

import zmq
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.exceptions import VLLMError
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from backends.vllm.engine_processes import FollowingSettings
from backends.vllm.failures import ENGINE_PROCESS, first_mistake
from backends.vllm.machine import fit
from backends.vllm.metrics import EngineMetrics
from backends.vllm.ray_workers import hand_group
from backends.vllm.settings import EngineModel, check_names, hide_folders
from backends.vllm.start_reports import StartReporter, one_line
from gateway.errors import Code, InferenceError

log = logging.getLogger("sluice.vllm")

Engine = TypeVar("Engine")

KNOWN_ARGUMENTS = frozenset(field.name for field in fields(AsyncEngineArgs))
LOG_ARGUMENTS = frozenset({"log_level", "log_config_file", "logging_config"})

REDIRECTS = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"

CONTEXT = UsageContext.OPENAI_API_SERVER
"""Selects vLLM's default batch limits for servers."""

MISTAKES = (ValueError, TypeError, OSError, NotImplementedError, AssertionError)
"""Errors that vLLM raises for unusable arguments."""

FAILURES = (*MISTAKES, RuntimeError, ImportError, VLLMError)
"""Errors that vLLM raises if it does not start."""


async def start_engine(
    model: EngineModel, metrics: EngineMetrics | None, reporter: StartReporter
) -> Any:
    """Start an AsyncLLM in a thread.

    Raises InferenceError if it does not start. Cancelling kills the started processes.
    """
    if model.whereabouts:
        log.warning("model not found on this host", extra=model.log_fields)
    return await started(model, partial(_start, model, metrics, reporter), stop_engine)


async def started(
    model: EngineModel, start: Callable[[], Engine], stop: Callable[[Engine], Awaitable[None]]
) -> Engine:
    """Call `start` in a thread and return its result.

    Raises InferenceError if the engine does not start. Cancelling kills the engine's processes
    started so far, and calls `stop` with the result, if there is one.
    """
    before = set(multiprocessing.active_children())
    thread = ThreadPoolExecutor(1, "vllm-startup")
    starting = asyncio.get_running_loop().run_in_executor(thread, start)
    thread.shutdown(wait=False)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await _abandon(starting, before, stop)
        raise
    except FAILURES as error:
        log.debug("engine not started", exc_info=error, extra=model.log_fields)
        raise _explain(error, model) from error


async def stop_engine(engine: Any) -> None:
    """Stop an engine, dead or alive, and release its resources in this process."""
    if engine.output_handler is not None:
        engine.output_handler.cancel()
    await asyncio.to_thread(engine.shutdown)
    _close_sockets(engine.engine_core.resources)


def _close_sockets(resources: Any) -> None:
    """Close the sockets to the engine: vLLM leaks two threads of ZeroMQ per engine."""
    for socket in (
        resources.input_socket,
        resources.output_socket,
        resources.first_req_send_socket,
        resources.first_req_rcv_socket,
        resources.stats_update_socket,
    ):
        if socket is not None:
            socket.close(linger=0)
    resources.ctx.destroy(linger=0)


def engine_arguments(model: EngineModel) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs: `model.json`, with our defaults for name and log level."""
    check_names(model.arguments, KNOWN_ARGUMENTS, model=model.name)
    defaults: dict[str, Any] = {"served_model_name": model.name}
    chosen = LOG_ARGUMENTS.isdisjoint(model.arguments) and not envs.is_set("VLLM_LOGGING_LEVEL")
    if chosen and not log.isEnabledFor(logging.DEBUG):
        defaults["log_level"] = "ERROR"
    return defaults | dict(model.arguments)


def engine_config(model: EngineModel, **more: Any) -> tuple[AsyncEngineArgs, Any]:
    """The arguments of an engine, and its configuration; `more` are further arguments."""
    arguments, _ = _arguments(model, **more)
    return arguments, arguments.create_engine_config(usage_context=CONTEXT)


def own_engine_config(
    model: EngineModel, reporter: StartReporter, **more: Any
) -> tuple[AsyncEngineArgs, Any]:
    """The same for the process that starts the engine, in a thread of its own.

    The engine's processes stay on the model's cores, exit with this one, and report their start.
    """
    if model.cpu_cores:
        # Of this thread alone; its child processes inherit the affinity, and vLLM respects it.
        os.sched_setaffinity(0, model.cpu_cores)
    arguments, changed = _arguments(model, **more)
    if changed:
        log.warning("engine arguments changed", extra={"model": model.name, **changed})
    config = arguments.create_engine_config(usage_context=CONTEXT)
    hand_group(config.parallel_config, model.placement_group)
    if not config.parallel_config.use_ray and isinstance(config.additional_config, dict):
        config.additional_config = FollowingSettings(config.additional_config, reporter)
    return arguments, config


def _arguments(model: EngineModel, **more: Any) -> tuple[AsyncEngineArgs, Mapping[str, str]]:
    """The arguments, and those changed for this machine."""
    _refuse_redirects()
    cli_env_setup()  # as `vllm serve`: processes are spawned, not forked
    arguments = AsyncEngineArgs(**engine_arguments(model), **more)
    return arguments, fit(arguments, model.arguments)


def new_client(
    arguments: AsyncEngineArgs, config: Any, metrics: EngineMetrics | None, **more: Any
) -> Any:
    """An AsyncLLM; without `more` it starts the engine. Blocks until the engine is ready."""
    # As an attribute: vLLM reads it for each token, and would look into the environment.
    envs.VLLM_COMPUTE_NANS_IN_LOGITS = envs.VLLM_COMPUTE_NANS_IN_LOGITS
    try:
        return AsyncLLM.from_vllm_config(
            config,
            usage_context=CONTEXT,
            stat_loggers=[metrics.logger()] if metrics is not None else None,
            enable_log_requests=arguments.enable_log_requests,
            disable_log_stats=arguments.disable_log_stats,
            **more,
        )
    except BaseException as error:
        _close_contexts(error)
        raise


def _close_contexts(error: BaseException) -> None:
    """Stop the threads of ZeroMQ that a failed AsyncLLM started.

    vLLM closes the sockets; only frames of its constructors refer to their context.
    """
    for frame, _ in walk_tb(error.__traceback__):
        for value in tuple(frame.f_locals.values()):
            if isinstance(value, zmq.Context):
                value.destroy(linger=0)


def _start(model: EngineModel, metrics: EngineMetrics | None, reporter: StartReporter) -> Any:
    arguments, config = own_engine_config(model, reporter)
    return new_client(arguments, config, metrics)


def _refuse_redirects() -> None:
    """Images are fetched from allowed hosts only: a redirect could name another one."""
    if not envs.is_set(REDIRECTS):
        setattr(envs, REDIRECTS, False)


async def _abandon(
    starting: asyncio.Future[Engine],
    before: Collection[BaseProcess],
    stop: Callable[[Engine], Awaitable[None]],
) -> None:
    """Abort a cancelled start-up, which fails as soon as its process exits."""
    for process in set(multiprocessing.active_children()) - set(before):
        if process.name.startswith(ENGINE_PROCESS):
            process.kill()
    with suppress(*FAILURES):
        await stop(await starting)


def _explain(error: Exception, model: EngineModel) -> InferenceError:
    if isinstance(error, MISTAKES):
        code, reason = Code.INVALID_ARG, model.whereabouts + first_mistake(error)
    else:
        code, reason = Code.INTERNAL, one_line(error)
    text = f"model '{model.name}': {reason}"
    return InferenceError(code, hide_folders(text, model.folders))
