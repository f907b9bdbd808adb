"""The command `sluice fleet`: the replicas of a fleet on Ray, and its end."""

import argparse
import atexit
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gateway.fleet import ray_cluster, ray_state
from gateway.fleet.ray_controller import ModelStatus
from gateway.fleet.ray_views import ReplicaPhase
from gateway.settings import netloc

COLUMNS = ("model", "replica", "state", "node", "address", "need")


PROGRESS_SECS = 30.0
"""A command without an answer of Ray for this time ends; a status has a limit before it."""
EXIT_SECS = 5.0
"""Ray's library has this time to leave the cluster once the command has its result."""
FAILED = 1
INTERRUPTED = 128 + signal.SIGINT


class Watchdog:
    """The end of this process, with an error, if Ray does not answer what a block waits for.

    Calls of Ray's library on a head that hangs have no limit, cannot be interrupted, and are also
    in its hook at the exit: the exit status is then that of the block, which shows its result.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._status: int | None = None
        self._ends_at = time.monotonic() + PROGRESS_SECS
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        with self._changed:
            self._status = 0 if kind is None else INTERRUPTED if interrupted else FAILED
            self.answer()
        # The hooks run in the opposite order: that of Ray, which is imported, comes later.
        atexit.register(self._leave)

    def progress(self) -> None:
        """Count the time anew: Ray has answered."""
        self._move(PROGRESS_SECS)

    def answer(self) -> None:
        """Stop the time: Ray has answered all, and the rest of the block does not wait for it."""
        self._move(math.inf)

    def _leave(self) -> None:
        with suppress(OSError):
            sys.stdout.flush()
        self._move(EXIT_SECS)

    def _move(self, secs: float) -> None:
        with self._changed:
            self._ends_at = time.monotonic() + secs
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while (left := self._ends_at - time.monotonic()) > 0:
                self._changed.wait(None if left == math.inf else left)
            # A result that comes now waits for the lock: it is too late.
            if self._status is None:
                sys.stderr.write(
                    f"sluice: {ray_state.place()} has not answered for {PROGRESS_SECS:g} s, while "
                    f"this command waited for {self._what}, expected a head that runs: look at it "
                    "with `ray status`, and run this again\n"
                )
                sys.stderr.flush()
            os._exit(FAILED if self._status is None else self._status)


def run(parsed: argparse.Namespace, console: Console) -> None:
    """Run `status` or `down`; UNAVAILABLE with the reason of Ray.

    Ends this process if Ray does not answer for PROGRESS_SECS.
    """
    ray_state.connect()
    fleet = parsed.fleet_name
    if parsed.action == "status":
        with Watchdog(f"the status of fleet '{fleet}'") as watchdog:
            models = ray_cluster.next_status(fleet)
            watchdog.answer()
            _show(models, console)
        return
    with Watchdog(f"the end of fleet '{fleet}'") as watchdog:
        ended = ray_cluster.end_fleet(fleet, parsed.drain_secs, watchdog.progress)
        watchdog.answer()
        console.print(Text(f"fleet '{fleet}' ended, with {ended} replicas"))


def _show(models: Sequence[ModelStatus], console: Console) -> None:
    console.print(status_table(models))
    for each in models:
        if each.trouble:
            console.print(Text(f"{each.model}: {each.trouble}"))
        if each.rollout.is_open:
            state = each.rollout.state
            shown = f"rollout of version {state['candidate']}: {state['state']}"
            console.print(Text(f"{each.model}: {shown}, {state['weight']:g} %"))


def status_table(models: Sequence[ModelStatus]) -> Table:
    """A row for each model, and one for each of its replicas."""
    shown = Table(*(Column(name, overflow="fold") for name in COLUMNS))
    for model in models:
        ready = sum(each.phase is ReplicaPhase.READY for each in model.replicas)
        count = f"{ready} of {model.wanted}"
        shown.add_row(Text(model.model), count, "", "", "", f"{model.need:.2f}")
        for each in model.replicas:
            name, address = each.name.rpartition(":")[2], netloc(each.host, each.port)
            where = address if each.port else ""
            shown.add_row("", name, each.phase, each.node[:8], where, f"{each.need:.2f}")
    return shown
