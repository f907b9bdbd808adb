"""From `model.json` to an instance that serves."""

import asyncio
import logging
import time
from typing import Any

from backends.vllm.failures import Failures
from backends.vllm.instance import RunningEngine, VllmInstance, lora_request
from backends.vllm.lora import Adapters, read_adapters
from backends.vllm.metrics import EngineMetrics
from backends.vllm.model_json import EngineModel
from backends.vllm.prompt import PromptRenderer
from backends.vllm.startup import start_engine, stop_engine
from backends.vllm.watch import Watch
from gateway.backend import Instance, ModelContext
from gateway.errors import Code, InferenceError

log = logging.getLogger("sluice.vllm")


async def open_instance(model: EngineModel, context: ModelContext) -> Instance:
    """Start the engine of a model and put an instance before it."""
    adapters = _adapters(model, context)
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
        engine = RunningEngine(
            model=model.name,
            llm=llm,
            watch=watch,
            tasks=frozenset(tasks),
            prompts=await _prompts(llm),
            adapters=adapters,
            failures=Failures(model.name, model.folders),
            metrics=metrics,
        )
        await _load_adapters(engine)
    except BaseException:
        watch.close()
        await stop_engine(llm)
        raise
    _tell_ready(engine, time.monotonic() - began)
    return VllmInstance(engine, context.wasted)


async def _prompts(llm: Any) -> PromptRenderer:
    prompts = PromptRenderer(llm)
    await asyncio.to_thread(prompts.warm_up)
    return prompts


async def _load_adapters(engine: RunningEngine) -> None:
    """Load each adapter once: a broken one would take the engine down when a request names it."""
    for adapter in (engine.adapters.by_name or {}).values():
        try:
            await engine.watch.unless_ended(engine.llm.add_lora(lora_request(adapter)))
        except Exception as error:
            # Around a part of one model load: a failed call into the engine has no other type.
            reason = engine.failures.clean(error)
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{engine.model}': its adapter '{adapter.name}' cannot be loaded: {reason}",
            ) from error


def _metrics(model: EngineModel, context: ModelContext) -> EngineMetrics | None:
    if model.arguments.get("disable_log_stats", False):
        return None
    triton_names = _is_true(context.config.parameters.get("REPORT_CUSTOM_METRICS", ""))
    return EngineMetrics(model.name, context.path.name, triton_names=triton_names)


def _adapters(model: EngineModel, context: ModelContext) -> Adapters:
    if not _is_true(model.arguments.get("enable_lora", False)):
        return Adapters()
    return read_adapters(context.path, model=model.name)


def _is_true(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


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
