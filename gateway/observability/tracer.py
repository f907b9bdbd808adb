"""Which requests are traced: the settings of each model, and their samples (trace extension)."""

import itertools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from gateway.errors import Code, InferenceError
from gateway.observability.trace import Trace
from gateway.observability.trace_file import TraceFile
from gateway.settings import TraceSettings

log = logging.getLogger("sluice.trace")

ALL_MODELS = ""
PIECE_CHARS = 256 * 1024
"""Traces without end are written in pieces of that size."""
MOST_CHARS = 16 * 1024 * 1024
"""Beyond it, those that wait for others of their file make one without them."""


class Sampling:
    """One setting in force: counts the requests it sees, and keeps the traces it takes."""

    def __init__(self, settings: TraceSettings, file: TraceFile) -> None:
        self._settings = settings
        self._file = file
        self._seen = 0
        self._left = settings.count
        self._taken = 0
        self._collected = 0
        self._waiting: list[str] = []
        self._waiting_chars = 0
        self._retired = False

    @property
    def settings(self) -> TraceSettings:
        """The setting, with the count of traces that are left to take."""
        return replace(self._settings, count=self._left)

    @property
    def on(self) -> bool:
        """Whether it can take a trace at all."""
        return not refusal(self._settings) and self._left != 0

    def take(self) -> bool:
        """Whether the request that has just come is sampled; counts it."""
        self._seen += 1
        if self._seen % self._settings.rate:
            return False
        self._left -= self._left > 0
        self._taken += 1
        return True

    def keep(self, trace: Trace) -> None:
        """Write the trace, or let it wait for the others of its file; an empty one only counts."""
        if trace.objects:
            text = orjson.dumps(trace.objects).decode()[1:-1]
            self._waiting.append(text)
            self._waiting_chars += len(text)
        self._collected += 1
        frequency = self._settings.log_frequency
        last = self._left == 0 and self._collected == self._taken
        full = frequency and len(self._waiting) >= frequency
        if self._waiting and (last or full or self._waiting_chars > MOST_CHARS):
            self._file.write_numbered(self._waiting)
            self._forget()
        elif self._retired or (self._settings.count < 0 and self._waiting_chars > PIECE_CHARS):
            self._write_rest()

    def retire(self) -> None:
        """Write what waits: another setting is in force from now on, or the server ends."""
        self._retired = True
        self._write_rest()

    def _write_rest(self) -> None:
        if self._settings.log_frequency and not self._retired:
            return
        if self._settings.log_frequency and self._waiting:
            self._file.write_numbered(self._waiting)
        else:
            self._file.append(self._waiting)
        self._forget()

    def _forget(self) -> None:
        self._waiting = []
        self._waiting_chars = 0


def refusal(settings: TraceSettings) -> str:
    """Why such a setting takes no traces; "" if it does."""
    if not settings.levels:
        return "tracing is disabled"
    if not settings.rate:
        return "sample rate must be non-zero"
    return "" if settings.file else "trace file name is not given"


class Tracer:
    """The setting of all models, and of those that have their own.

    A model's own setting has some fields; the others are those of all models, whose own fall back
    to what the server was started with. `on` is False while nothing can be traced: whoever takes
    requests asks for it first.
    """

    def __init__(self, settings: TraceSettings | None = None) -> None:
        self._start = settings or TraceSettings()
        self._file = TraceFile(self._start.file)
        self._chosen: dict[str, dict[str, Any]] = {ALL_MODELS: {}}
        self._samplings = {ALL_MODELS: Sampling(self._start, self._file)}
        self._numbers = itertools.count(1)
        self.on = self._samplings[ALL_MODELS].on
        if self._start.levels and not self.on:
            log.warning("nothing is traced", extra={"reason": refusal(self._start)})

    def begin(self, model: str) -> Trace | None:
        """The trace of a request for that model that has just come, if it is sampled."""
        sampling = self._samplings.get(model) or self._samplings[ALL_MODELS]
        if not sampling.on or not sampling.take():
            return None
        if not sampling.on:
            self._look()
        return Trace(next(self._numbers), sampling.settings.levels, sampling.keep, self._numbers)

    def settings(self, model: str = ALL_MODELS) -> TraceSettings:
        """What holds for a model, or for those without a setting of their own."""
        return (self._samplings.get(model) or self._samplings[ALL_MODELS]).settings

    def update(self, model: str, changes: Mapping[str, Any]) -> None:
        """Set fields of TraceSettings; None lets one fall back.

        Raises INVALID_ARG for what would trace, and cannot; nothing has changed then.
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
        """Write what waits to be written."""
        for sampling in self._samplings.values():
            sampling.retire()
        self._file.close()

    def _effective(self, model: str, chosen: Mapping[str, Any], *, counted: bool) -> TraceSettings:
        """With `counted`, a count of the model's own goes on from what is left of it."""
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
            self._samplings[model] = Sampling(settings, self._file)
        if before is not None:
            before.retire()

    def _look(self) -> None:
        self.on = any(sampling.on for sampling in self._samplings.values())
