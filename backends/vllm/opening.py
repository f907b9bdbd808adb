"""From `model.json` to an instance that serves."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMError

from backends.vllm.failures import Failures
from backends.vllm.instance import RunningEngine, VllmInstance, lora_request
from backends.vllm.lora import Adapters, read_adapters
from backends.vllm.metrics import EngineMetrics
from backends.vllm.model_json import EngineModel, is_true, lora_enabled
from backends.vllm.prompt import PromptRenderer
from backends.vllm.serving.refusals import Refusals
from backends.vllm.serving.state import Served, check_parsers, handlers
from backends.vllm.startup import MISTAKES, start_engine, stop_engine
from backends.vllm.warm_up import GENERATE, warm_up
from backends.vllm.watch import Watch
from gateway.backend import Instance, ModelContext
from gateway.errors import Code, InferenceError
from gateway.openai_exchange import further_names

log = logging.getLogger("sluice.vllm")


async def open_instance(model: EngineModel, context: ModelContext) -> Instance:
    """Start the engine of a model and put an instance before it."""
    adapters = _adapters(model, context)
    check_parsers(model)
    metrics = _metrics(model, context)
    began = time.monotonic()
    log.info("starting engine", extra={"model": model.name})
    llm = await start_engine(model, metrics)
    resources = llm.engine_core.resources
    # Actors of Ray are no processes of ours: only what an engine sends tells that they ended.
    watch = Watch(getattr(resources.engine_manager, "processes", ()))
    try:
        tasks = await watch.unless_ended(llm.get_supported_tasks())
        # An engine that has lost a worker says so long before its process has ended.
        watch.add_task(resources.output_queue_task)
        failures = Failures(model.name, model.folders)
        await _load_adapters(llm, watch, adapters, failures)
        served = _served(model, context, adapters)
        state = await watch.unless_ended(_handlers(llm, served, tasks, failures))
        engine = RunningEngine(
            model=model.name,
            llm=llm,
            watch=watch,
            tasks=frozenset(tasks),
            prompts=PromptRenderer(llm, state.online_renderer),
            adapters=adapters,
            handlers=state,
            failures=failures,
            refusals=Refusals(failures, model.folders),
            metrics=metrics,
        )
        await _warm_up(engine)
    except BaseException:
        watch.close()
        await stop_engine(llm)
        raise
    _tell_ready(engine, time.monotonic() - began)
    return VllmInstance(engine, context.wasted)


def _served(model: EngineModel, context: ModelContext, adapters: Adapters) -> Served:
    offered = adapters.by_name or {}
    others = [each for each in further_names(context.config) if each not in offered]
    return Served(
        names=(model.name, *others), adapters=tuple(offered.values()), settings=model.openai
    )


async def _handlers(llm: Any, served: Served, tasks: Sequence[str], failures: Failures) -> Any:
    try:
        return await handlers(llm, served, tasks)
    except MISTAKES as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{served.names[0]}': its settings for OpenAI's requests cannot be used: "
            f"{failures.clean(error)}",
        ) from error


async def _load_adapters(llm: Any, watch: Watch, adapters: Adapters, failures: Failures) -> None:
    """Load each adapter once: a broken one would take the engine down when a request names it."""
    for adapter in (adapters.by_name or {}).values():
        try:
            await watch.unless_ended(llm.add_lora(lora_request(adapter)))
        except Exception as error:
            # Around a part of one model load: a failed call into the engine has no other type.
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{failures.model}': its adapter '{adapter.name}' cannot be loaded: "
                f"{failures.clean(error)}",
            ) from error


async def _warm_up(engine: RunningEngine) -> None:
    if GENERATE in engine.tasks:
        try:
            warming = warm_up(engine.llm, engine.prompts, model=engine.model)
            await engine.watch.unless_ended(warming)
        except VLLMError as error:
            raise engine.failures.explain(error) from error
    if engine.metrics is not None:
        engine.metrics.begin()


def _metrics(model: EngineModel, context: ModelContext) -> EngineMetrics | None:
    if model.arguments.get("disable_log_stats", False):
        return None
    triton_names = is_true(context.config.parameters.get("REPORT_CUSTOM_METRICS", ""))
    return EngineMetrics(model.name, context.path.name, triton_names=triton_names)


def _adapters(model: EngineModel, context: ModelContext) -> Adapters:
    if not lora_enabled(model.arguments):
        return Adapters()
    return read_adapters(context.path, model=model.name)


def _tell_ready(engine: RunningEngine, secs: float) -> None:
    config = engine.llm.vllm_config
    log.info(
        "engine ready",
        extra={
            "model": engine.model,
            "secs": round(secs, 1),
            "tasks": sorted(engine.tasks),
            "max_context": config.model_config.max_model_len,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "max_sequences": config.scheduler_config.max_num_seqs,
        },
    )
