"""Reloads, unloads and kills during the soak."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from loadtests.soak import census
from loadtests.soak.http_clients import Connection, post
from loadtests.soak.models import MODELS, Model, Trouble, config
from loadtests.soak.requests import Tally
from loadtests.soak.server import SoakServer

LOAD_SECS = 60.0
LEAVE_SECS = 0.2
PAUSE_SECS = 0.8
MOST_KILLS = 4
FRONTEND = "frontend"
RESTART_SECS = 20.0
"""A frontend that is still starting is not killed."""

LATELY_SECS = 90.0
RELOADED = [
    model
    for model in MODELS
    if Trouble.RELOADED in model.troubles and "ensemble" not in model.config
]
KILLED = [model for model in MODELS if Trouble.KILLED in model.troubles]


@dataclass(frozen=True, slots=True)
class Disturbances:
    """One after the other, with pauses; a model that was unloaded is loaded again at once."""

    server: SoakServer
    tally: Tally
    random: random.Random
    kills: dict[str, list[float]] = field(default_factory=dict)

    async def run(self, ended: asyncio.Event) -> None:
        """Disturb until the event is set; TimeoutError if a load takes too long."""
        while not ended.is_set():
            await self.random.choice(ACTS)(self)
            await asyncio.wait(
                [asyncio.ensure_future(ended.wait())], timeout=self.random.random() * PAUSE_SECS
            )
        for model in RELOADED:
            config(self.server.repository, model).write_text(model.config)
            await self._ask(model, "load")

    async def reload(self) -> None:
        """Change a config and load it."""
        self.tally.acts["reload"] += 1
        model = self.random.choice(RELOADED)
        self._change(model)
        await self._ask(model, "load")

    async def leave_reload(self) -> None:
        """Change a config, and leave its load."""
        self.tally.acts["reload left"] += 1
        model = self.random.choice(RELOADED)
        self._change(model)
        async with Connection(self.server.ports["http"]) as connection:
            await connection.send(post(f"/v2/repository/models/{model.name}/load", b"{}"))
            await asyncio.sleep(self.random.random() * LEAVE_SECS)

    async def unload(self) -> None:
        """Unload a model, and load it."""
        self.tally.acts["unload and load"] += 1
        model = self.random.choice(RELOADED)
        await self._ask(model, "unload")
        await self._ask(model, "load")

    async def kill(self) -> None:
        """Kill the worker of a Python model, unless too many were killed lately.

        Each restart waits twice as long as the one before it, until a worker has lived a minute.
        """
        model, now = self.random.choice(KILLED), time.monotonic()
        lately = [each for each in self.kills.get(model.name, ()) if each > now - LATELY_SECS]
        if len(lately) < MOST_KILLS:
            self.kills[model.name] = [*lately, now]
            self._kill(census.workers(self.server.pid, model.name))

    async def kill_frontend(self) -> None:
        """Kill a process that has the clients' connections, where there are such processes."""
        now, last = time.monotonic(), self.kills.get(FRONTEND, [-RESTART_SECS])[-1]
        if self.server.has_frontends and now > last + RESTART_SECS:
            self.kills[FRONTEND] = [now]
            self.tally.cuts = True
            self._kill(census.frontends(self.server.pid))

    def _kill(self, processes: Sequence[int]) -> None:
        if processes:
            self.tally.acts["kill"] += 1
            # The one that was chosen may have ended meanwhile.
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(processes), signal.SIGKILL)

    def _change(self, model: Model) -> None:
        count = self.random.randrange(1, 4)
        groups = f"instance_group {{ count: {count} kind: KIND_CPU }}\n"
        lines = (line for line in model.config.splitlines() if not line.startswith("instance_g"))
        config(self.server.repository, model).write_text("\n".join((*lines, groups)))

    async def _ask(self, model: Model, what: str) -> None:
        async with Connection(self.server.ports["http"]) as connection:
            await connection.send(post(f"/v2/repository/models/{model.name}/{what}", b"{}"))
            async with asyncio.timeout(LOAD_SECS):
                answer = await connection.answer()
        if answer.status != 200:
            self.tally.surprise(f"{what} of {model.name}: {answer.status} {answer.body[:200]!r}")


ACTS: Sequence[Callable[[Disturbances], Awaitable[None]]] = (
    Disturbances.reload,
    Disturbances.leave_reload,
    Disturbances.unload,
    Disturbances.kill,
    Disturbances.kill_frontend,
)
