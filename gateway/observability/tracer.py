"""Selection of the requests to trace, by settings of all models and of each (trace extension)."""

import itertools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from gateway.errors import Code, InferenceError
from gateway.observability.client_files import client_file, refused_file
from gateway.observability.escaping import escaped
from gateway.observability.trace import LEVELS, Trace, TraceFile
from gateway.settings import TraceSettings

LEVEL = "trace_level"
FILE = "trace_file"
OFF = "OFF"
MODE = "triton"
BOUNDS = {
    "trace_rate": ("rate", 0, 2**32 - 1),
    "trace_count": ("count", -1, 2**31 - 1),
    "log_frequency": ("log_frequency", 0, 2**32 - 1),
}
"""Settings of one number: the field of TraceSettings, the least and the largest value."""

log = logging.getLogger("sluice.trace")

NUMBER = re.compile(r"-?[0-9]{1,32}")

ALL_MODELS = ""
MOST_FILES = 64
PIECE_CHARS = 256 * 1024
"""Size of the pieces in which the file without a number grows."""
MOST_CHARS = 16 * 1024 * 1024
"""Traces that wait for others of their file; beyond this they are written without them."""


def show_trace_settings(settings: TraceSettings) -> dict[str, str | list[str]]:
    """The settings as the protocol shows them, in Triton's order."""
    return {
        LEVEL: list(settings.levels) or [OFF],
        "trace_rate": str(settings.rate),
        "trace_count": str(settings.count),
        "log_frequency": str(settings.log_frequency),
        FILE: settings.file,
        "trace_mode": MODE,
    }


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


class TraceSampling:
    """One setting in force: it counts requests, and collects the traces it takes."""

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
        """The setting, with `count` reduced by the traces taken."""
        return replace(self._settings, count=self._left)

    @property
    def on(self) -> bool:
        """Whether any request can still be traced."""
        return not refusal(self._settings) and self._left != 0

    def take(self, *, is_chosen: bool = False) -> bool:
        """Count a request; return whether it is sampled, as one that `is_chosen` always is."""
        self._seen += 1
        if self._seen % self._settings.rate and not is_chosen:
            return False
        self._left -= self._left > 0
        self._taken += 1
        return True

    def keep(self, trace: Trace) -> None:
        """Write the trace, or hold it until its file is full; an empty one only counts."""
        if trace.objects:
            text = escaped(_json(trace.objects)[1:-1])
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
        """Write the held traces: the setting was replaced, or the server stops."""
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


def _json(objects: Sequence[Mapping[str, Any]]) -> str:
    try:
        return orjson.dumps(objects).decode()
    except TypeError:  # half of a surrogate pair, as in the id of a program's request
        return json.dumps(objects, ensure_ascii=False).encode(errors="replace").decode()


def refusal(settings: TraceSettings) -> str:
    """The reason why a setting takes no traces; "" if it takes some."""
    if not settings.levels:
        return "tracing is disabled"
    if not settings.rate:
        return "sample rate must be non-zero"
    return "" if settings.file else "trace file name is not given"


class Tracer:
    """The setting of all models, and the settings of single models.

    A field that a model does not set is that of all models, and a field that is set for neither is
    that of the command line. `on` is False while no request can be traced; frontends check it.
    """

    def __init__(self, settings: TraceSettings | None = None) -> None:
        self._start = settings or TraceSettings()
        self._files: dict[str, TraceFile] = {}
        self._chosen: dict[str, dict[str, Any]] = {ALL_MODELS: {}}
        self._samplings = {ALL_MODELS: self._sampling(self._start)}
        self._numbers = itertools.count(1)
        self.on = self._samplings[ALL_MODELS].on
        if self._start.levels and not self.on:
            log.warning("nothing is traced", extra={"reason": refusal(self._start)})

    def begin(self, model: str, traceparent: str = "") -> Trace | None:
        """A trace for a new request to that model; None if it is not sampled.

        One with a `traceparent` is sampled by its router: the rate does not matter.
        """
        sampling = self._samplings.get(model) or self._samplings[ALL_MODELS]
        if not sampling.on or not sampling.take(is_chosen=bool(traceparent)):
            return None
        if not sampling.on:
            self._look()
        levels = sampling.settings.levels
        trace = Trace(next(self._numbers), levels, sampling.keep, self._numbers)
        trace.traceparent = traceparent
        return trace

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
        file = self._files.setdefault(settings.file, TraceFile(settings.file))
        return TraceSampling(settings, file)

    def _look(self) -> None:
        self.on = any(sampling.on for sampling in self._samplings.values())
