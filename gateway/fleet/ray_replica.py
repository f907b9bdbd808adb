"""The process of a replica on Ray: its start, its address, its need, and its end."""

import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http.client import HTTPException
from itertools import takewhile
from typing import BinaryIO, TextIO
from urllib.request import ProxyHandler, build_opener

from gateway.fleet.ray_addresses import RayFleet
from gateway.fleet.ray_views import ReplicaPhase, ReplicaView
from gateway.json_lines import cut
from gateway.processes.module_commands import module_command

log = logging.getLogger("sluice.fleet")

MODULE = "gateway.fleet.ray_replica"
ANNOUNCED = re.compile(r"^\s*(fleet|metrics)\s+\S+:(\d+)\s*$")
NEED = re.compile(rb"^gateway_fleet_need\{[^}]*\} (\S+)$", re.MULTILINE)
METRICS_SECS = 0.5
KEPT_SECS = 60.0
"""The last need holds for this time while the metrics page has none."""
LAST_LINES = 5
"""Lines of the log that are in the reason of an end without an error of the command."""
ERROR = "sluice: "
"""The beginning of that error, which is the reason, without the log before it.

Its own lines are indented, and lines below them are those of the log.
"""
ERROR_LINES = 20
READ_SECS = 0.5
"""The last lines of a replica that has ended are read within this time."""
THIS_MACHINE = "127.0.0.1"
EXIT_TIMEOUT = "--exit-timeout-secs"
KILL_SECS = 60.0
"""A draining replica is killed this time after its own limit."""


class NeedPage:
    """The need of a replica, as its metrics page has it."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._opener = build_opener(ProxyHandler({}))
        self._last = 0.0
        self._last_until = clock() + KEPT_SECS
        self._is_logged = False

    def need(self, port: int) -> float:
        """The largest need of its models: an ensemble is as busy as its busiest member."""
        try:
            self._last = self._read(port)
        except TimeoutError:
            # One that is too busy to answer is fully used.
            return 1.0
        except (OSError, HTTPException, ValueError) as error:
            if not self._is_logged:
                about = {"model": self._model, "port": port, "reason": str(error)}
                log.warning("metrics page not read", extra=about)
            self._is_logged = True
            return self._last if self._clock() < self._last_until else 0.0
        self._last_until, self._is_logged = self._clock() + KEPT_SECS, False
        return self._last

    def _read(self, port: int) -> float:
        page = f"http://{THIS_MACHINE}:{port}/metrics"
        with self._opener.open(page, timeout=METRICS_SECS) as answer:
            found = NEED.findall(answer.read())
        if not found:
            raise ValueError("no need in it")
        return max(map(float, found))


class ReplicaProcess:
    """`sluice replica MODEL` as a child process, which ends with this process.

    It listens at `host` on free ports; its metrics page is for this machine. It does not begin,
    or has ended, if `refusal` has a reason before, or once it has loaded its files. One that drains
    for longer than its own limit is killed.
    """

    def __init__(
        self,
        view: ReplicaView,
        options: Sequence[str],
        environment: Mapping[str, str],
        refusal: Callable[[], str],
    ) -> None:
        self._view = view
        self._refusal = refusal
        self._refused = refusal()
        self._has_read = False
        self._page = NeedPage(view.model)
        self._ports: dict[str, int] = {}
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._error: list[str] = []
        self._reading: threading.Thread | None = None
        self._is_draining = False
        limits = RayFleet("", tuple(options)).values(EXIT_TIMEOUT)
        self._most_drain_secs = sum(map(float, limits)) + KILL_SECS
        self._child: subprocess.Popen[str] | None = None
        if not self._refused:
            self._child = self._begin(options, environment)
            log_of_child = (self._child.stderr,)
            self._reading = threading.Thread(target=self._read, args=log_of_child, daemon=True)
            self._reading.start()

    def _begin(
        self, options: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[str]":
        view = self._view
        own = [f"--fleet-address={view.host}", "--fleet-port=0", "--allow-metrics=true"]
        metrics = [f"--metrics-address={THIS_MACHINE}", "--metrics-port=0"]
        return subprocess.Popen(
            module_command(MODULE, "replica", view.model, *options, *own, *metrics),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **environment},
        )

    def view(self) -> ReplicaView:
        """The present view of it."""
        known = self._view
        phase, need = self._phase(), 0.0
        if phase is ReplicaPhase.READY and not self._has_read:
            # The controller ends the actor of a replica that has ended, and the child ends with it.
            self._has_read, self._refused = True, self._refusal()
            phase = self._phase()
        if phase is ReplicaPhase.READY:
            need = self._page.need(self._ports["metrics"])
        return replace(
            known,
            phase=phase,
            port=self._ports.get("fleet", 0),
            need=need,
            reason=self._reason() if phase is ReplicaPhase.ENDED else "",
        )

    def drain(self) -> None:
        """Let it complete its requests and end."""
        if self._child is not None and not self._is_draining:
            self._child.send_signal(signal.SIGTERM)
            killing = threading.Timer(self._most_drain_secs, self._child.kill)
            killing.daemon = True
            killing.start()
        self._is_draining = True

    def _phase(self) -> ReplicaPhase:
        if self._refused or self._child is None or self._child.poll() is not None:
            return ReplicaPhase.ENDED
        if self._is_draining:
            return ReplicaPhase.DRAINING
        return ReplicaPhase.READY if len(self._ports) == 2 else ReplicaPhase.STARTING

    def _reason(self) -> str:
        if self._refused or self._child is None:
            return self._refused
        status = self._child.returncode
        if self._is_draining and not status:
            return ""
        if self._reading is not None:
            self._reading.join(READ_SECS)
        if not self._error:
            return "\n".join((f"it ended with status {status}", *list(self._lines)))
        error, *others = list(self._error)
        indented = list(takewhile(lambda line: line[0].isspace(), others))
        first = " ".join(map(str.strip, (error, *indented)))
        return "\n".join((f"it ended with status {status}: {first}", *others[len(indented) :]))

    def _read(self, written: TextIO) -> None:
        """Pass its log on to Ray's log of this process."""
        for line in written:
            sys.stderr.write(line)
            if found := ANNOUNCED.match(line):
                self._ports[found[1]] = int(found[2])
            elif line.strip():
                self._note(cut(line.rstrip()))

    def _note(self, line: str) -> None:
        """Keep a line for the reason of an end: the last ones, and the first ones of an error."""
        self._lines.append(line)
        if line.startswith(ERROR):
            self._error = [line.removeprefix(ERROR)]
        elif self._error and len(self._error) < ERROR_LINES:
            self._error.append(line)


def end_with(pipe: BinaryIO) -> None:
    """End this process at once, with that at the other end of a pipe."""
    pipe.read()
    os._exit(1)


def main() -> None:
    """The command `sluice`; the actor has the other end of its standard input."""
    actor = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    threading.Thread(target=end_with, args=(actor,), daemon=True).start()
    runpy.run_module("gateway", run_name="__main__")


if __name__ == "__main__":
    main()
