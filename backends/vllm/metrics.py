"""Metrics of one engine, in its own registry.

vLLM uses the registry of the process and unregisters the metrics of other engines there, so only
the engine loaded last would have metrics. Likewise it counts tool calls by the name of that model.
"""

import collections
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.abstract_parser import DelegatingParser
from vllm.v1.metrics import loggers

from backends.vllm.queue_limits import QueueLimits

TIME_PER_OUTPUT_TOKEN = "vllm:time_per_output_token_seconds"
"""Triton's name for what vLLM calls `vllm:inter_token_latency_seconds`, with Triton's buckets."""
BUCKETS_SECS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

OUTPUTS = "gateway_vllm_outputs"
OUTPUTS_HELP = (
    "Outputs of the engine: deltas that were diverted past vLLM's objects and handlers to the "
    "response, and outputs that went vLLM's way."
)

PARTS = {
    "_spec_decoding_cls": loggers.SpecDecodingProm,
    "_kv_connector_cls": loggers.KVConnectorProm,
    "_ec_connector_cls": loggers.ECConnectorProm,
    "_perf_metrics_cls": loggers.PerfMetricsProm,
}
"""Loggers that vLLM's own logger creates, by the attributes with their classes."""

PARSERS = (("openai_serving_chat", "parser_cls"), ("openai_serving_responses", "parser"))
"""Handlers that parse tool calls, each with its attribute for the parser's class."""

NAME = "vllm:tool_call_parser_invocations_total"
STREAMING, WHOLE = "streaming", "non_streaming"
CALLED, NOT_CALLED = "tool_call", "no_tool_call"
REQUESTS = {ChatCompletionRequest: "chat_completions", ResponsesRequest: "responses"}
OTHER = "other"


class OutputCounts:
    """Counts the outputs of an engine by their way to the response."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = Counter(OUTPUTS, OUTPUTS_HELP, ["way"], registry=registry)
        self._diverted, self._read = counter.labels("diverted"), counter.labels("vllm")

    def add(self, *, diverted: int, read: int) -> None:
        """Add the outputs of one request."""
        self._diverted.inc(diverted)
        self._read.inc(read)


class EngineMetrics:
    """vLLM's series of one engine, with Triton's labels `model` and `version` added.

    `triton_names` adds the one series of Triton's backend that vLLM has under another name.
    `outputs` counts by the way that outputs took. Other counts start with `begin`, so warm-up
    requests are not counted; `limits` has the limits of its queue since then.
    """

    def __init__(self, model: str, version: str, *, triton_names: bool) -> None:
        self._labels = {"model": model, "version": version}
        self._registry = CollectorRegistry()
        self.outputs = OutputCounts(self._registry)
        self._latency = self._triton_latency() if triton_names else None
        self._begun = False
        self._step = StepTime()
        self.limits: QueueLimits | None = None

    def begin(self, scheduler: Any) -> None:
        """Start counting for an engine with that `SchedulerConfig`."""
        self._begun = True
        self.limits = QueueLimits(scheduler.max_num_seqs)

    @property
    def begun(self) -> bool:
        """Whether counting has started."""
        return self._begun

    def note_step(self, step: Any, engine_index: int) -> None:
        """Note the limit of the queue after a step, of the only engine."""
        if step is None or self.limits is None:
            return
        if engine_index:
            self.limits = None  # the engine of a request is not known
        else:
            self.limits.note(step, self._step.secs or time.monotonic())

    def order_by_step(self, engine_core: Any) -> None:
        """Give gauges the time of the engine's step that they describe.

        Clients of one engine receive its steps in any order, and the last one may be stale.
        """
        engine_core.get_output_async = self._step.noting(engine_core.get_output_async)

    def logger(self) -> Any:
        """The class of the stat logger for AsyncLLM."""
        kinds = _kinds(self._registry, self._step)
        parts = {name: _within(part, kinds) for name, part in PARTS.items()}
        latency, metrics = self._latency, self

        class Logger(loggers.PrometheusStatLogger):  # type: ignore[misc]  # vllm is not typed
            """vLLM's logger; observes the latencies of a step together, and Triton's series."""

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                if not metrics.begun:
                    return
                metrics.note_step(scheduler_stats, engine_idx)
                latencies: list[float] = []
                if iteration_stats is not None:
                    latencies = iteration_stats.inter_token_latencies_iter
                    iteration_stats.inter_token_latencies_iter = []
                super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
                if latencies:
                    iteration_stats.inter_token_latencies_iter = latencies
                    self.histogram_inter_token_latency[engine_idx].observe_each(latencies)
                    if latency is not None:
                        latency.observe_each(latencies)

        return type("EngineLogger", (Logger,), kinds | parts)

    def count_tool_calls(self, state: Any, model_name: str) -> None:
        """Count the invocations of the tool parsers of vLLM's handlers in `state`."""
        counter = ToolCallCounter(model_name, self._registry)
        for place, attribute in PARSERS:
            handler = getattr(state, place, None)
            if handler is not None:
                setattr(handler, attribute, counter.counted(getattr(handler, attribute)))

    def collect(self) -> Iterator[Metric]:
        """The current metric families."""
        for family in self._registry.collect():
            yield labelled(family, self._labels)

    def _triton_latency(self) -> "StepHistogram":
        return StepHistogram(
            TIME_PER_OUTPUT_TOKEN,
            "Histogram of time per output token in seconds.",
            buckets=BUCKETS_SECS,
            registry=self._registry,
        )


class StepTime:
    """The time at which the engine made the step that is being recorded, in its monotonic clock."""

    def __init__(self) -> None:
        self.secs = 0.0

    def noting(self, get: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        """The function that gets the outputs of the next step, also noting their time."""

        async def noted() -> Any:
            outputs = await get()
            self.secs = outputs.timestamp
            return outputs

        return noted


def _kinds(registry: CollectorRegistry, step: StepTime) -> dict[str, Any]:
    """The attributes of vLLM's loggers that create series, bound to the registry."""
    gauge = partial(_gauge, type("StepGauge", (StepGauge,), {"step": step}))
    return {
        f"_{kind.__name__.lower()}_cls": staticmethod(partial(made, registry=registry))
        for kind, made in ((Counter, Counter), (Gauge, gauge), (Histogram, StepHistogram))
    }


class StepGauge(Gauge):
    """Of several processes that of the newest step has the value, if its mode is `mostrecent`."""

    step: StepTime

    def set(self, value: float) -> None:
        """Set the value as of the current step."""
        if self._is_most_recent:
            self._value.set(float(value), timestamp=self.step.secs or time.monotonic())
        else:
            super().set(value)


class StepHistogram(Histogram):
    """Observes the values of a step at once: the latencies of most of its requests are equal."""

    def observe_each(self, values: Iterable[float]) -> None:
        """As `observe` of each value."""
        for value, count in collections.Counter(values).items():
            self._sum.inc(value * count)
            self._buckets[bisect_left(self._upper_bounds, value)].inc(count)


def _gauge(
    kind: type[Gauge], name: str, documentation: str, multiprocess_mode: str = "all", **named: Any
) -> Gauge:
    """A gauge; the one of mode `sum` is a time, which is not summed over clients."""
    mode: Any = "max" if multiprocess_mode == "sum" else multiprocess_mode
    return kind(name, documentation, multiprocess_mode=mode, **named)


def _within(part: type, kinds: Mapping[str, Any]) -> type:
    return type(part.__name__, (part,), {k: v for k, v in kinds.items() if hasattr(part, k)})


def labelled(family: Metric, labels: Mapping[str, str]) -> Metric:
    """The family with further labels."""
    found = Metric(family.name, family.documentation, family.type, family.unit)
    found.samples = [
        Sample(s.name, {**s.labels, **labels}, s.value, s.timestamp, s.exemplar)
        for s in family.samples
    ]
    return found


class ToolCallCounter:
    """The series `vllm:tool_call_parser_invocations_total` of one model, with vLLM's labels.

    A failed parser is counted as `no_tool_call`, as in vLLM.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._counter = Counter(
            NAME,
            "Total number of ToolParser invocations. Non-streaming increments once per choice; "
            "streaming increments once per delta.",
            ["model_name", "mode", "outcome", "request_type"],
            registry=registry,
        )
        for labels in product(
            (STREAMING, WHOLE), (CALLED, NOT_CALLED), (*REQUESTS.values(), OTHER)
        ):
            self._counter.labels(model_name, *labels)

    def counted(self, parser: type) -> type:
        """A subclass of the parser whose invocations are counted as vLLM counts them."""
        # vLLM counts in the methods of DelegatingParser only.
        methods = {
            name: counting
            for name, counting in (
                ("extract_tool_calls", self._whole(parser)),
                ("extract_tool_calls_streaming", self._streaming(parser)),
            )
            if getattr(parser, name, None) is getattr(DelegatingParser, name)
        }
        return type(parser.__name__, (parser,), methods)

    def _whole(self, parser: Any) -> Any:
        def extract_tool_calls(own: Any, model_output: str, request: Any) -> Any:
            called = False
            try:
                found = parser.extract_tool_calls(own, model_output, request)
                called = bool(found.tools_called)
            finally:
                self._count(WHOLE, own, request, called=called)
            return found

        return extract_tool_calls

    def _streaming(self, parser: Any) -> Any:
        def extract_tool_calls_streaming(own: Any, *texts_and_request: Any) -> Any:
            called = False
            try:
                found = parser.extract_tool_calls_streaming(own, *texts_and_request)
                called = bool(found and found.tool_calls)
            finally:
                self._count(STREAMING, own, texts_and_request[-1], called=called)
            return found

        return extract_tool_calls_streaming

    def _count(self, mode: str, parser: Any, request: object, *, called: bool) -> None:
        if parser.tool_parser is None:
            return
        kind = REQUESTS.get(type(request), OTHER)
        self._counter.labels(self._model_name, mode, CALLED if called else NOT_CALLED, kind).inc()


class SharedMetrics:
    """Metrics of an engine with several clients: the sum of their files in a folder."""

    def __init__(self, model: str, version: str, folder: Path) -> None:
        self._labels = {"model": model, "version": version}
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        """The current metric families."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self._folder))  # type: ignore[no-untyped-call]
        for family in registry.collect():
            yield labelled(family, self._labels)
