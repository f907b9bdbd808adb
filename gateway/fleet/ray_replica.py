"""The process of a replica on Ray: its start, its address, its need, and its end."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.request import urlopen

from gateway.fleet.ray_controller import ReplicaPhase, ReplicaView

ANNOUNCED = re.compile(r"^\s*(fleet|metrics)\s+\S+:(\d+)\s*$")
NEED = re.compile(rb"^gateway_fleet_need\{[^}]*\} (\S+)$", re.MULTILINE)
METRICS_SECS = 0.5
LAST_LINES = 5
"""Lines of the log that are in the reason of an end."""
THIS_MACHINE = "127.0.0.1"


class ReplicaProcess:
    """`sluice replica MODEL` as a child process, which ends with this process.

    It listens at `host` on free ports; its metrics page is for this machine.
    """

    def __init__(self, view: ReplicaView, options: Sequence[str], *, sees_gpus: bool) -> None:
        self._view = view
        self._ports: dict[str, int] = {}
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._is_draining = False
        own = [f"--fleet-address={view.host}", "--fleet-port=0", "--allow-metrics=true"]
        metrics = [f"--metrics-address={THIS_MACHINE}", "--metrics-port=0"]
        command = [sys.executable, "-P", "-m", "gateway", "replica", view.model]
        self._child = subprocess.Popen(
            [*command, *options, *own, *metrics],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(sees_gpus=sees_gpus),
        )
        threading.Thread(target=self._read, daemon=True).start()

    def view(self) -> ReplicaView:
        """The present view of it."""
        known = self._view
        phase, need = self._phase(), 0.0
        if phase is ReplicaPhase.READY:
            need = self._need()
        return ReplicaView(
            name=known.name,
            model=known.model,
            phase=phase,
            node=known.node,
            host=known.host,
            port=self._ports.get("fleet", 0),
            need=need,
            reason=self._reason() if phase is ReplicaPhase.ENDED else "",
        )

    def drain(self) -> None:
        """Let it complete its requests and end."""
        self._is_draining = True
        self._child.send_signal(signal.SIGTERM)

    def _phase(self) -> ReplicaPhase:
        if self._child.poll() is not None:
            return ReplicaPhase.ENDED
        if self._is_draining:
            return ReplicaPhase.DRAINING
        return ReplicaPhase.READY if len(self._ports) == 2 else ReplicaPhase.STARTING

    def _reason(self) -> str:
        status = self._child.returncode
        if self._is_draining and not status:
            return ""
        return f"it ended with status {status}: " + "\n".join(self._lines)

    def _need(self) -> float:
        """The largest need of its models: an ensemble is as busy as its busiest member."""
        page = f"http://{THIS_MACHINE}:{self._ports['metrics']}/metrics"
        with suppress(OSError), urlopen(page, timeout=METRICS_SECS) as answer:
            return max(map(float, NEED.findall(answer.read())), default=0.0)
        # One that is too busy to answer is fully used.
        return 1.0

    def _read(self) -> None:
        """Pass its log on to Ray's log of this process."""
        for line in self._child.stderr or ():
            sys.stderr.write(line)
            if found := ANNOUNCED.match(line):
                self._ports[found[1]] = int(found[2])
            elif line.strip():
                self._lines.append(line.rstrip())


def _environment(*, sees_gpus: bool) -> Mapping[str, str]:
    # Ray hides the GPUs of other replicas only from those that have some.
    return os.environ if sees_gpus else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
