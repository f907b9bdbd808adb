"""Loading of a model: engine, adapters, handlers and warm-up."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from backends.vllm.engine import MISTAKES, start_engine, stop_engine
from backends.vllm.engine_processes import Watch
from backends.vllm.engine_request import EngineRequest
from backends.vllm.failures import REFUSALS, EngineErrors, Failures
from backends.vllm.instance import RunningEngine, VllmInstance, lora_request
from backends.vllm.metrics import EngineMetrics
from backends.vllm.prompts import PromptRenderer, render_short_in_place
from backends.vllm.serving.refusals import Refusals
from backends.vllm.serving.serving import check_parsers, open_handlers
from backends.vllm.settings import EngineModel, LoraAdapters
from backends.vllm.sleeper import EngineSleeper
from gateway.backend import Instance
from gateway.errors import Code, InferenceError

log = logging.getLogger("sluice.vllm")

GENERATE = "generate"
ANY_TOKEN = [0]


async def open_instance(model: EngineModel, wasted: Callable[[int], None]) -> Instance:
    """Start the engine of a model and return its instance."""
    check_parsers(model)
    metrics = engine_metrics(model)
    began = time.monotonic()
    log.info("starting engine", extra={"model": model.name})
    with EngineErrors(model) as errors:
        llm = await start_engine(model, metrics, errors.reporter)
        async with watched(llm) as watch:
            engine = await open_engine(model, llm, watch, metrics)
            if metrics is not None and model.openai.tool_call_parser:
                # A client process has one model, so vLLM's own counter is correct there.
                served = llm.vllm_config.model_config.served_model_name
                metrics.count_tool_calls(engine.handlers, served)
            log_ready(engine, time.monotonic() - began)
            instance = VllmInstance(engine, wasted)
            if model.sleep_level:
                instance.sleeper = EngineSleeper(llm, watch, model.sleep_level)
            return instance


@asynccontextmanager
async def watched(llm: Any) -> AsyncIterator[Watch]:
    """The watch of an engine's client.

    An error in the block closes the watch and stops the client, and the engine that it started.
    """
    async with AsyncExitStack() as owner:
        owner.push_async_callback(stop_engine, llm)
        # Actors of Ray are not child processes: only the engine reports their end.
        watch = Watch(getattr(llm.engine_core.resources.engine_manager, "processes", ()))
        owner.callback(watch.close)
        yield watch
        owner.pop_all()


async def open_engine(
    model: EngineModel,
    llm: Any,
    watch: Watch,
    metrics: EngineMetrics | None,
    *,
    warms_up: bool = True,
) -> RunningEngine:
    """Load adapters and open handlers of a running engine.

    One of several clients warms the engine up. Raises InferenceError if any of this fails.
    """
    tasks = await watch.unless_ended(llm.get_supported_tasks())
    # An engine reports a dead worker long before its process exits.
    watch.add_task(llm.engine_core.resources.output_queue_task)
    failures = Failures(model.name, model.folders)
    await _load_adapters(llm, watch, model.adapters, failures)
    state = await watch.unless_ended(_handlers(llm, model, tasks, failures))
    render_short_in_place(llm.renderer, model.openai.chat_template)
    engine = RunningEngine(
        model=model.name,
        llm=llm,
        watch=watch,
        tasks=frozenset(tasks),
        prompts=PromptRenderer(llm, state.online_renderer),
        adapters=model.adapters,
        handlers=state,
        failures=failures,
        refusals=Refusals(failures, model.folders),
        metrics=metrics,
    )
    if warms_up and GENERATE in engine.tasks:
        await _warm_up(engine)
    if metrics is not None:
        metrics.begin(llm.vllm_config.scheduler_config)
    return engine


def engine_metrics(model: EngineModel) -> EngineMetrics | None:
    """The metrics of an engine, unless its model disables them."""
    if model.arguments.get("disable_log_stats", False):
        return None
    return EngineMetrics(model.name, model.version, triton_names=model.triton_metrics)


def log_ready(engine: RunningEngine, secs: float) -> None:
    """Log the properties of a started engine."""
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


async def _handlers(llm: Any, model: EngineModel, tasks: Sequence[str], failures: Failures) -> Any:
    try:
        return await open_handlers(llm, model, tasks)
    except MISTAKES as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{model.name}': its settings for OpenAI's requests cannot be used: "
            f"{failures.clean(error)}",
        ) from error


async def _load_adapters(
    llm: Any, watch: Watch, adapters: LoraAdapters, failures: Failures
) -> None:
    """Load each adapter once: a broken one kills the engine when a request names it."""
    for adapter in (adapters.by_name or {}).values():
        try:
            await watch.unless_ended(llm.add_lora(lora_request(adapter)))
        except Exception as error:
            # Around one model load: a failed call into the engine has no narrower type.
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{failures.model}': its adapter '{adapter.name}' cannot be loaded: "
                f"{failures.clean(error)}",
            ) from error


async def _warm_up(engine: RunningEngine) -> None:
    try:
        warming = warm_up(engine.llm, engine.prompts, model=engine.model)
        await engine.watch.unless_ended(warming)
    except VLLMError as error:
        raise engine.failures.explain(error) from error


async def warm_up(engine: Any, prompts: PromptRenderer, *, model: str) -> None:
    """Generate one token with its log probability.

    vLLM compiles the ranking of log probabilities (`batched_count_greater_than`) when the first
    request asks for them: for some seconds, in a step that all requests share. A model that
    refuses the prompt is not warmed up.
    """
    parameters = SamplingParams(
        max_tokens=1, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    try:
        async with EngineRequest(engine, f"{model}-warm-up", _wasted) as running:
            await running.submit(await prompts.render_prompt(ANY_TOKEN), parameters)
            while not running.finished:
                await running.next()
    except REFUSALS as error:
        log.warning("engine not warmed up", extra={"model": model, "reason": str(error)[:200]})


def _wasted(tokens: int) -> None:
    """Tokens of the warm-up are not counted."""
