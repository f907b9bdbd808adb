"""Selection of the requests to trace, by settings of all models and of each (trace extension)."""

import itertools
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from gateway.backend import MetricReading
from gateway.errors import Code, InferenceError
from gateway.observability.client_files import client_file, refused_file
from gateway.observability.request_context import CURRENT
from gateway.observability.sampling import (
    FileSampling,
    SpanSampling,
    SpanSink,
    TraceSampling,
    refusal,
)
from gateway.observability.trace import LEVELS, TENSORS, Trace, TraceFile
from gateway.observability.traceparent import ForcedSampling, ParentSpan
from gateway.policy.caller import Caller
from gateway.settings import TraceSettings
from gateway.span_settings import SpanSettings

LEVEL = "trace_level"
FILE = "trace_file"
OFF = "OFF"
TRITON, OPENTELEMETRY = "triton", "opentelemetry"
BOUNDS = {
    "trace_rate": ("rate", 0, 2**32 - 1),
    "trace_count": ("count", -1, 2**31 - 1),
    "log_frequency": ("log_frequency", 0, 2**32 - 1),
}
"""Settings of one number: the field of TraceSettings, the least and the largest value."""

log = logging.getLogger("sluice.trace")

SHOWN = ("url", "bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")

NUMBER = re.compile(r"-?[0-9]{1,32}")

ALL_MODELS = ""
MOST_FORCED = 50
"""Requests per second that callers with keys may have traced at any rate."""
DROPPED = "gateway_spans_dropped_total"
MOST_FILES = 64


def show_trace_settings(settings: TraceSettings) -> dict[str, str | list[str]]:
    """The settings as the protocol shows them, in Triton's order."""
    found: dict[str, str | list[str]] = {
        LEVEL: list(settings.levels) or [OFF],
        "trace_rate": str(settings.rate),
        "trace_count": str(settings.count),
    }
    if settings.spans is not None:
        return found | {"trace_mode": OPENTELEMETRY, **shown_span_settings(settings.spans)}
    files = {"log_frequency": str(settings.log_frequency), FILE: settings.file}
    return found | files | {"trace_mode": TRITON}


def shown_span_settings(spans: SpanSettings) -> dict[str, str | list[str]]:
    """The settings of the export as the protocol shows them; it cannot change them."""
    shown = {name: str(getattr(spans, name)) for name in SHOWN}
    resource = [f"{name}={value}" for name, value in spans.resource]
    return {**shown, "resource": resource} if resource else {**shown}


def read_trace_settings(
    wanted: Mapping[str, Sequence[str] | None],
    file_named: Callable[[Sequence[str] | None], str | None],
) -> dict[str, Any]:
    """Fields of TraceSettings for `Tracer.update`; None clears one. Unknown names are ignored.

    Raises INVALID_ARG for an invalid value, and the error of `file_named` (`Tracer.file_named`).
    """
    found: dict[str, Any] = {}
    if FILE in wanted:
        found["file"] = file_named(wanted[FILE])
    if LEVEL in wanted:
        found |= _level_change(wanted[LEVEL])
    for name, (field, least, largest) in BOUNDS.items():
        if name in wanted:
            found[field] = _number(name, wanted[name], least, largest)
    return found


def _level_change(names: Sequence[str] | None) -> dict[str, Any]:
    """The new levels; unknown ones are ignored, and without a known one nothing changes."""
    if names is None:
        return {"levels": None}
    if OFF in names:
        if len(names) > 1:
            raise InferenceError(Code.INVALID_ARG, "Expect only one trace level 'OFF' is specified")
        return {"levels": ()}
    levels = tuple(level for level in LEVELS if level in names)
    return {"levels": levels} if levels else {}


def _number(name: str, texts: Sequence[str] | None, least: int, largest: int) -> int | None:
    if texts is None:
        return None
    if len(texts) != 1:
        raise InferenceError(Code.INVALID_ARG, f"expect only 1 value for '{name}'")
    text = texts[0]
    if not NUMBER.fullmatch(text):
        raise InferenceError(Code.INVALID_ARG, f"Unable to parse '{name}', got: {text[:64]}")
    if least < 0 and int(text) < least:
        raise InferenceError(
            Code.INVALID_ARG, f"Unable to parse '{name}'. Expecting value >= {least}, got:{text}"
        )
    if not least <= int(text) <= largest:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Unable to parse '{name}', value is out of range [ {least}, {largest} ], got: {text}",
        )
    return int(text)


def build_tracer(settings: TraceSettings) -> "Tracer":
    """The tracer of a server; UNSUPPORTED without the packages of its mode.

    Few servers import them.
    """
    if settings.spans is None:
        return Tracer(settings)
    try:
        sink: SpanSink = import_module("gateway.observability.otlp").SpanExporter(settings.spans)
    except ModuleNotFoundError as error:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"--trace-config mode=opentelemetry needs the package {error.name}, which is not "
            "installed: pip install 'sluice[otel]'",
        ) from None
    for option, value in (("triton,file", settings.file), ("triton,log-frequency", None)):
        if value or (value is None and settings.log_frequency):
            log.warning("setting ignored", extra={"setting": option, "mode": OPENTELEMETRY})
    if TENSORS in settings.levels:
        log.warning("setting ignored", extra={"setting": "level=TENSORS", "mode": OPENTELEMETRY})
    return Tracer(settings, sink)


class Tracer:
    """The setting of all models, and the settings of single models.

    A field that a model does not set is that of all models, and a field that is set for neither is
    that of the command line. `on` is False while no request can be traced; frontends check it.
    With a `sink` traces are spans, and frontends pass the context of callers if it `reads_headers`.
    """

    def __init__(self, settings: TraceSettings | None = None, sink: SpanSink | None = None) -> None:
        self._start = settings or TraceSettings()
        self._sink = sink
        self._forced = ForcedSampling(MOST_FORCED)
        self._files: dict[str, TraceFile] = {}
        self._chosen: dict[str, dict[str, Any]] = {ALL_MODELS: {}}
        self._samplings = {ALL_MODELS: self._sampling(self._start)}
        self._numbers = itertools.count(1)
        self.on = self._samplings[ALL_MODELS].on
        self.reads_headers = sink is not None
        if self._start.levels and not self.on:
            log.warning("nothing is traced", extra={"reason": refusal(self._start)})

    def begin(
        self, model: str, parent: ParentSpan | None = None, caller: Caller | None = None
    ) -> Trace | None:
        """A trace for a new request to that model; None if it is not sampled.

        A request without a parent that is not the next one of the rate is counted only. One with a
        `parent` is sampled at any rate; on a server with keys only for a `caller` with one, and at
        most MOST_FORCED times per second.
        """
        sampling = self._samplings.get(model) or self._samplings[ALL_MODELS]
        if parent is None and sampling.ahead:
            sampling.ahead -= 1
            return None
        is_chosen = parent is not None and self._may_choose(caller)
        trace = sampling.begin(self._numbers, parent, is_chosen=is_chosen)
        if trace is None:
            return None
        if not sampling.on:
            self._look()
        logged = CURRENT.get()
        if logged is not None and (ids := trace.spans) is not None:
            logged.belongs(ids.trace_id, ids.root_id)
        return trace

    def _may_choose(self, caller: Caller | None) -> bool:
        """Whether a request is traced because its sender traces it."""
        if caller is None:
            return True
        return bool(caller.tenant) and self._forced.take(time.monotonic())

    def settings(self, model: str = ALL_MODELS) -> TraceSettings:
        """The setting in force for a model, by default for models without their own."""
        return (self._samplings.get(model) or self._samplings[ALL_MODELS]).settings

    def file_named(self, wanted: Sequence[str] | None) -> str | None:
        """The path of a file that a client names, None for no own one of the setting.

        Raises InferenceError if traces may not be written there: a file of another kind is never
        replaced by one of traces.
        """
        directory = self._start.directory
        if wanted is None and directory:
            return None
        name = wanted[0] if wanted and len(wanted) == 1 else None
        path = client_file(name, self._files, directory, "trace")
        if path not in self._files and Path(path).exists():
            raise refused_file(path, "trace", "it exists, expected a new file")
        if path not in self._files and len(self._files) >= MOST_FILES:
            reason = f"there are {MOST_FILES} files of traces, the most of this server"
            raise refused_file(path, "trace", reason)
        return path

    def update(self, model: str, changes: Mapping[str, Any]) -> None:
        """Set fields of TraceSettings; None resets one.

        Raises INVALID_ARG for a setting with levels that cannot trace; then nothing changes.
        """
        if not changes:
            return
        chosen = {**self._chosen.get(model, {}), **changes}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        settings = self._effective(model, chosen, counted="count" not in changes)
        reason = refusal(settings)
        if reason and settings.levels:
            raise InferenceError(
                Code.INVALID_ARG, f"Attempting to set invalid trace setting :{reason}"
            )
        self._replace(model, chosen, settings)
        if model == ALL_MODELS:
            for name in [name for name in self._chosen if name != ALL_MODELS]:
                own = self._chosen[name]
                self._replace(name, own, self._effective(name, own, counted=True))
        self._look()

    def close(self) -> None:
        """Write all held traces, and complete the file."""
        for sampling in self._samplings.values():
            sampling.retire()
        for file in self._files.values():
            file.close()
        if self._sink is not None:
            self._sink.close()

    def families(self) -> list[MetricReading]:
        """The metrics of the export of spans, if there is one."""
        if self._sink is None:
            return []
        found = MetricReading(DROPPED, "Spans that no collector has got, by reason", "counter")
        for reason, spans in self._sink.drops.items():
            found.add_sample(DROPPED, {"reason": reason}, spans)
        return [found]

    def _effective(self, model: str, chosen: Mapping[str, Any], *, counted: bool) -> TraceSettings:
        """With `counted`, the model's own count continues instead of starting again."""
        fallback = self._start if model == ALL_MODELS else self._samplings[ALL_MODELS].settings
        settings = replace(fallback, **chosen)
        if counted and "count" in chosen and model in self._samplings:
            return replace(settings, count=self._samplings[model].settings.count)
        return settings

    def _replace(self, model: str, chosen: dict[str, Any], settings: TraceSettings) -> None:
        before = self._samplings.pop(model, None)
        self._chosen.pop(model, None)
        if chosen or model == ALL_MODELS:
            self._chosen[model] = chosen
            self._samplings[model] = self._sampling(settings)
        if before is not None:
            before.retire()

    def _sampling(self, settings: TraceSettings) -> TraceSampling:
        if self._sink is not None:
            return SpanSampling(settings, self._sink)
        file = self._files.setdefault(settings.file, TraceFile(settings.file))
        return FileSampling(settings, file)

    def _look(self) -> None:
        self.on = any(sampling.on for sampling in self._samplings.values())
