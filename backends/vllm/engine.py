"""How does a model become a running engine, and how does that end?"""

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

from backends.vllm.failures import ENGINE_PROCESS
from backends.vllm.machine import fit
from backends.vllm.metrics import EngineMetrics
from backends.vllm.orphans import ErrorSender, FollowingSettings, one_line
from backends.vllm.settings import EngineModel, check_names, hide_folders
from backends.vllm.validation import first_mistake
from gateway.errors import Code, InferenceError

log = logging.getLogger("sluice.vllm")

Engine = TypeVar("Engine")

KNOWN_ARGUMENTS = frozenset(field.name for field in fields(AsyncEngineArgs))
LOG_ARGUMENTS = frozenset({"log_level", "log_config_file", "logging_config"})

REDIRECTS = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"

CONTEXT = UsageContext.OPENAI_API_SERVER
"""Decides the default limits of a batch: those of a server."""

MISTAKES = (ValueError, TypeError, OSError, NotImplementedError, AssertionError)
"""What vLLM raises for arguments that it cannot use."""

FAILURES = (*MISTAKES, RuntimeError, ImportError, VLLMError)
"""What it raises when it does not start."""


async def start_engine(
    model: EngineModel, metrics: EngineMetrics | None, errors: ErrorSender
) -> Any:
    """A running AsyncLLM; the event loop stays free while it starts.

    InferenceError says why it does not start. When cancelled, it kills what it has started.
    """
    if model.whereabouts:
        log.warning("model is not on this host, vLLM looks for it", extra=model.log_fields)
    return await started(model, partial(_start, model, metrics, errors), stop_engine)


async def started(
    model: EngineModel, start: Callable[[], Engine], stop: Callable[[Engine], Awaitable[None]]
) -> Engine:
    """What `start` returns, called in a thread; the event loop stays free meanwhile.

    InferenceError says why it does not start. When cancelled, it kills the processes of an engine
    that were started, and has `stop` end what came of it.
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
        log.debug("engine did not start", exc_info=error, extra=model.log_fields)
        raise _explain(error, model) from error


async def stop_engine(engine: Any) -> None:
    """End an engine, dead or alive, and whatever belongs to it in this process."""
    if engine.output_handler is not None:
        engine.output_handler.cancel()
    await asyncio.to_thread(engine.shutdown)
    _close_sockets(engine.engine_core.resources)


def _close_sockets(resources: Any) -> None:
    """Close what vLLM talks to an engine with; it would leave two threads behind for each."""
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
    """What AsyncEngineArgs gets: `model.json`, and defaults for names and logs it leaves open."""
    check_names(model.arguments, KNOWN_ARGUMENTS, model=model.name)
    defaults: dict[str, Any] = {"served_model_name": model.name}
    chosen = LOG_ARGUMENTS.isdisjoint(model.arguments) and not envs.is_set("VLLM_LOGGING_LEVEL")
    if chosen and not log.isEnabledFor(logging.DEBUG):
        defaults["log_level"] = "ERROR"
    return defaults | dict(model.arguments)


def engine_config(model: EngineModel, **more: Any) -> tuple[AsyncEngineArgs, Any]:
    """The arguments of an engine, with some of vLLM's own more, and its configuration."""
    arguments, _ = _arguments(model, **more)
    return arguments, arguments.create_engine_config(usage_context=CONTEXT)


def own_engine_config(
    model: EngineModel, errors: ErrorSender, **more: Any
) -> tuple[AsyncEngineArgs, Any]:
    """The same for who starts the engine, in a thread of its own.

    Its processes will stay on the model's cores, end with this one, and send their errors.
    """
    if model.cpu_cores:
        # Of this thread alone; the processes it starts inherit it, and vLLM stays within.
        os.sched_setaffinity(0, model.cpu_cores)
    arguments, changed = _arguments(model, **more)
    if changed:
        log.warning("engine fitted to this machine", extra={"model": model.name, **changed})
    config = arguments.create_engine_config(usage_context=CONTEXT)
    if not config.parallel_config.use_ray and isinstance(config.additional_config, dict):
        config.additional_config = FollowingSettings(config.additional_config, errors)
    return arguments, config


def _arguments(model: EngineModel, **more: Any) -> tuple[AsyncEngineArgs, Mapping[str, str]]:
    """The arguments, and those that this machine changed."""
    _refuse_redirects()
    cli_env_setup()  # as `vllm serve`: processes are started afresh, not forked from this one
    arguments = AsyncEngineArgs(**engine_arguments(model), **more)
    return arguments, fit(arguments, model.arguments)


def new_client(
    arguments: AsyncEngineArgs, config: Any, metrics: EngineMetrics | None, **more: Any
) -> Any:
    """An AsyncLLM; unless told more it starts the engine. Blocks until that is ready."""
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
    """End the threads of ZeroMQ that a failed AsyncLLM has started.

    vLLM closes the sockets; only the frames of its constructors refer to their context.
    """
    for frame, _ in walk_tb(error.__traceback__):
        for value in tuple(frame.f_locals.values()):
            if isinstance(value, zmq.Context):
                value.destroy(linger=0)


def _start(model: EngineModel, metrics: EngineMetrics | None, errors: ErrorSender) -> Any:
    arguments, config = own_engine_config(model, errors)
    return new_client(arguments, config, metrics)


def _refuse_redirects() -> None:
    """An image comes from a host that is allowed, or not at all."""
    if not envs.is_set(REDIRECTS):
        setattr(envs, REDIRECTS, False)


async def _abandon(
    starting: asyncio.Future[Engine],
    before: Collection[BaseProcess],
    stop: Callable[[Engine], Awaitable[None]],
) -> None:
    """End a start-up that nobody waits for any more; it fails as soon as its process is gone."""
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
