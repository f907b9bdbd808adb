"""From `model.json` to an instance that serves."""

import logging
import time
from typing import Any

from backends.vllm.failures import Failures
from backends.vllm.instance import RunningEngine, VllmInstance
from backends.vllm.lora import Adapters, read_adapters
from backends.vllm.metrics import EngineMetrics
from backends.vllm.model_json import EngineModel
from backends.vllm.startup import start_engine
from gateway.backend import Instance, ModelContext

log = logging.getLogger("sluice.vllm")


async def open_instance(model: EngineModel, context: ModelContext) -> Instance:
    """Start the engine of a model and put an instance before it."""
    adapters = _adapters(model, context)
    metrics = EngineMetrics(
        model.name,
        context.path.name,
        triton_names=_is_true(context.config.parameters.get("REPORT_CUSTOM_METRICS", "")),
    )
    began = time.monotonic()
    log.info("starting engine", extra={"model": model.name})
    llm = await start_engine(model, metrics)
    tasks = frozenset(await llm.get_supported_tasks())
    engine = RunningEngine(
        model=model.name,
        llm=llm,
        tasks=tasks,
        adapters=adapters,
        failures=Failures(model.name, model.folders),
        metrics=metrics,
    )
    _tell_ready(engine, time.monotonic() - began)
    return VllmInstance(engine, context.wasted)


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
