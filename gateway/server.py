"""The process `sluice serve`: the core behind ports, ended by signals."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from gateway.core import Core
from gateway.listeners import BoundListeners
from gateway.loop_watch import LoopWatch
from gateway.models.model import Model
from gateway.observability.log import Log
from gateway.settings import Settings, netloc

log = logging.getLogger("sluice.server")

SWITCH_SECS = 0.001
"""Longest time for which a thread that decodes keeps the interpreter lock from the event loop.

Python's default is five times that: beside 60 MiB of JSON the 99th percentile of a health probe is
then 18 to 24 ms, and 7 to 14 ms with this. Decoding takes no longer.
"""


class Server:
    """A process that serves until a signal ends it."""

    def __init__(self, settings: Settings, log_of_process: Log | None = None) -> None:
        self._core = Core(settings, log_of_process)

    async def run(self, on_ready: Callable[[Mapping[str, int], Sequence[Model]], None]) -> None:
        """Serve until SIGTERM or SIGINT; returns when everything has ended.

        `on_ready` is called once the start-up models are loaded, with the ports in use and them.
        Raises StartFailed.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._core.stop)

        def ready(ports: Mapping[str, int]) -> None:
            _freeze()
            _tell_started(self._core.settings, ports)
            on_ready(ports, list(self._core.dataplane.models()))

        sys.setswitchinterval(SWITCH_SECS)
        with LoopWatch():
            await self._core.run(BoundListeners, ready)


def _tell_started(settings: Settings, ports: Mapping[str, int]) -> None:
    """Log the lines by which scripts know that Triton serves (protocol: flags, logging)."""
    for name, service, address in (
        ("grpc", "GRPCInferenceService", settings.grpc.address),
        ("http", "HTTPService", settings.http.address),
        ("metrics", "Metrics Service", settings.metrics.address),
    ):
        if name in ports:
            log.info("Started %s at %s", service, netloc(address, ports[name]))


def _freeze() -> None:
    """Take what start-up made out of the garbage collector's rounds; the process is ours."""
    gc.collect()
    gc.freeze()
