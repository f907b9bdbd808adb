"""Requests and instances without progress: logged, counted, and restarted on request.

Progress is a response, or the start of an execution.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from gateway.backend import Instance
from gateway.models.model import Model
from gateway.observability.request_record import Record
from gateway.schedulers.execution import Execution
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.progress")

NS_PER_SEC = 1_000_000_000
LOOK_SECS = 5.0
LOOKS_PER_STALL = 4
QUIET_SECS = 60.0
"""A request without progress for this time is logged (seconds)."""
REMIND_SECS = 600.0
"""It is logged again after this time (seconds)."""


class ProgressWatch:
    """Checks every model periodically; restarts stalled instances if `stall_secs` is not 0.

    An instance stalls while it executes and none of its executions makes progress. An execution
    that waits for a reader or for another model does not count.
    """

    def __init__(self, stall_secs: float = 0.0) -> None:
        self._stall_secs = stall_secs
        self._logged: dict[Record, int] = {}

    async def run(self, models: Callable[[], Iterable[Model]], clock_ns: Callable[[], int]) -> None:
        """Check periodically until cancelled."""
        pause = LOOK_SECS
        if self._stall_secs:
            pause = min(pause, self._stall_secs / LOOKS_PER_STALL)
        while True:
            await asyncio.sleep(pause)
            self.look(models(), clock_ns())

    def look(self, models: Iterable[Model], now_ns: int) -> None:
        """Log and restart requests and instances without progress."""
        logged: dict[Record, int] = {}
        for model in models:
            try:
                if self._stall_secs:
                    self._restart_stalled(model, now_ns)
                logged |= self._log_quiet(model, now_ns)
            except Exception:
                # Around one model: its defect must stop neither the watch nor the server.
                log.exception("progress check failed", extra={"model": model.name})
        self._logged = logged

    def _restart_stalled(self, model: Model, now_ns: int) -> None:
        since_ns = now_ns - round(self._stall_secs * NS_PER_SEC)
        for instance in stalled(model.executions, since_ns):
            model.restart(instance, f"it has made no progress for {self._stall_secs:g} s")

    def _log_quiet(self, model: Model, now_ns: int) -> dict[Record, int]:
        """Log the oldest request without progress; returns the times of logs."""
        quiet = list(model.quiet(now_ns - round(QUIET_SECS * NS_PER_SEC)))
        logged = {record: self._logged[record] for record, _ in quiet if record in self._logged}
        if quiet:
            record, stream = quiet[0]
            logged_ns = logged.get(record)
            if logged_ns is None or now_ns - logged_ns >= REMIND_SECS * NS_PER_SEC:
                logged[record] = now_ns
                extra = {
                    "model": model.name,
                    "version": model.version,
                    "secs": (now_ns - record.progress_ns) // NS_PER_SEC,
                    "waits_for": waits_for(model, record, stream),
                    "requests": len(quiet),
                }
                log.warning("request without progress", extra=extra)
        return logged


def stalled(executions: Iterable[Execution], since_ns: int) -> Iterator[Instance]:
    """The instances that execute without any progress since that time."""
    by_instance: dict[Instance, list[Execution]] = {}
    for execution in executions:
        if execution.progress_ns:
            by_instance.setdefault(execution.instance, []).append(execution)
    for instance, found in by_instance.items():
        if max(each.progress_ns for each in found) > since_ns:
            continue
        if not any(each.held_back or _members(each) for each in found):
            yield instance


def waits_for(model: Model, record: Record, stream: ResponseStream) -> str:
    """The thing that a request waits for, in words."""
    if stream.full:
        return "its reader"
    execution = next((each for each in model.executions if _has(each, record)), None)
    if execution is None:
        return "the queue"
    if execution.held_back:
        return "the reader of another request in its batch"
    if members := _members(execution):
        return f"model {', '.join(members)}"
    return f"instance {model.instance_name(execution.instance)}"


def _has(execution: Execution, record: Record) -> bool:
    return any(entry.record is record for entry in execution.entries)


def _members(execution: Execution) -> Sequence[str]:
    return sorted(set(execution.instance.waits_for))
