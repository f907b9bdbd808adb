"""Random clients until the time is over or one hangs; reloads, unloads and kills."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from loadtests.soak import grpc_clients, http_clients
from loadtests.soak.grpc_clients import GrpcClients
from loadtests.soak.http_clients import Closed, Connection, HttpClients, header, post
from loadtests.soak.models import BY_NAME, MODELS, Form, Model, Trouble
from loadtests.soak.requests import Question, Tally, Wrong
from loadtests.soak.server import OF_VERSIONS, SoakServer, config, frontends, workers

LOAD_SECS = 60.0
LEAVE_SECS = 0.2
CALM_SECS = 0.8
MOST_KILLS = 4
FRONTEND = "frontend"
FRONTEND_START_SECS = 20.0
"""A frontend that is still starting is not killed."""

REPLICA = "replica"
REPLICA_PAUSE_SECS = 20.0
"""A replica is killed at most this often."""

REST_SECS = 90.0
"""After MOST_KILLS kills a model has this time, after which its restarts wait for a second again.
They would wait for half a minute otherwise, and so would its requests."""
RELOADED = [
    model
    for model in MODELS
    if Trouble.RELOADED in model.troubles and "ensemble" not in model.config
]
KILLED = [model for model in MODELS if Trouble.KILLED in model.troubles]

HTTP_CLIENTS = 12
GRPC_CLIENTS = 4
ANSWER_SECS = 10.0
"""An act that takes longer hangs; reloads and restarts under load take seconds."""

RESTART_SECS = 20.0
"""A connection may wait so long for the next process where frontends are killed."""

LOOK_SHARE = 0.8
"""After this share of the time the server dumps its tasks, while the client still waits."""

PAUSE_SECS = 0.004
LARGEST = 2**24
"""Numbers below are exact in FP32."""

Acts = Mapping[str, tuple[float, Callable[[Any, Question], Awaitable[None]]]]
OFTEN = ("dynamic", "py_direct", "py_dynamic", "business", "py_pipeline", "seq_oldest", "embed")
RARELY = {"py_large": 0.3, "large": 0.1}
ENDED = http_clients.ENDED + grpc_clients.ENDED
MAY_END = frozenset({"HTTP garbage", "HTTP half-close", "gRPC garbage"})
"""Acts after which the server may close the connection without an answer."""


@dataclass(frozen=True, slots=True)
class Disturbances:
    """One after the other, with pauses; a model that was unloaded is loaded again at once."""

    server: SoakServer
    tally: Tally
    random: random.Random
    kills: dict[str, list[float]] = field(default_factory=dict)

    async def run(self, ended: asyncio.Event) -> None:
        """Disturb until the event is set; TimeoutError if a load takes too long."""
        acts = ACTS if self.server.replicas is None else ACTS_OF_ROUTER
        while not ended.is_set():
            await self.random.choice(acts)(self)
            await asyncio.wait(
                [asyncio.ensure_future(ended.wait())],
                timeout=self.random.random() * CALM_SECS,
            )
        for model in RELOADED if self.server.replicas is None else ():
            config(self.server.repository, model).write_text(model.config)
            await self._ask(model, "load")

    async def reload(self) -> None:
        """Change a config and load it."""
        self.tally.acts["reload"] += 1
        model = self.random.choice(RELOADED)
        self._change(model)
        await self._ask(model, "load")

    async def leave_reload(self) -> None:
        """Change a config, and disconnect during its load."""
        self.tally.acts["reload left"] += 1
        model = self.random.choice(RELOADED)
        self._change(model)
        async with Connection(self.server.ports["http"]) as connection:
            path = f"/v2/repository/models/{model.name}/load"
            await connection.send(post(path, b"{}", self._admin))
            await asyncio.sleep(self.random.random() * LEAVE_SECS)

    async def unload(self) -> None:
        """Unload a model, and load it."""
        self.tally.acts["unload and load"] += 1
        model = self.random.choice(RELOADED)
        await self._ask(model, "unload")
        await self._ask(model, "load")

    async def change_version(self) -> None:
        """Load both versions of a model, and unload one of them alone."""
        self.tally.acts["load and unload of one version"] += 1
        await self._ask(BY_NAME[OF_VERSIONS], "load", versions="1,2")
        await self._ask(BY_NAME[OF_VERSIONS], "unload", versions=self.random.choice("12"))

    async def kill(self) -> None:
        """Kill the worker of a Python model, unless too many were killed lately.

        Each restart waits twice as long as the one before it, until a worker has lived a minute.
        """
        model, now = self.random.choice(KILLED), time.monotonic()
        row = self.kills.get(model.name, [])
        if row and now > row[-1] + REST_SECS:
            row = []
        if len(row) < MOST_KILLS:
            self.kills[model.name] = [*row, now]
            self._kill(workers(self.server.pid, model.name))

    async def kill_frontend(self) -> None:
        """Kill a process that has the clients' connections, where there are such processes."""
        now, last = time.monotonic(), self.kills.get(FRONTEND, [-FRONTEND_START_SECS])[-1]
        if self.server.has_frontends and now > last + FRONTEND_START_SECS:
            self.kills[FRONTEND] = [now]
            self.tally.cuts = True
            self._kill(frontends(self.server.pid))

    async def kill_replica(self) -> None:
        """Kill a replica of the router while all have every model; another starts at its port."""
        now, last = time.monotonic(), self.kills.get(REPLICA, [-REPLICA_PAUSE_SECS])[-1]
        replicas = self.server.replicas
        if replicas is not None and now > last + REPLICA_PAUSE_SECS and replicas.are_ready:
            self.kills[REPLICA] = [now]
            self.tally.lost_at = now
            self.tally.acts["kill of a replica"] += 1
            await asyncio.to_thread(replicas.restart_one, self.random)

    async def rewrite_keys(self) -> None:
        """Replace the key file: the guest's key comes or goes, and its requests end."""
        self.tally.acts["reload of keys"] += 1
        with_guest = self.random.random() < 0.5
        await asyncio.to_thread(self.server.keys.write, with_guest=with_guest)

    @property
    def _admin(self) -> str:
        return header(self.server.keys.admin)

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

    async def _ask(self, model: Model, what: str, **parameters: str) -> None:
        body = json.dumps({"parameters": parameters}).encode()
        async with Connection(self.server.ports["http"]) as connection:
            path = f"/v2/repository/models/{model.name}/{what}"
            await connection.send(post(path, body, self._admin))
            async with asyncio.timeout(LOAD_SECS):
                answer = await connection.answer()
        if answer.status != 200:
            self.tally.surprise(f"{what} of {model.name}: {answer.status} {answer.body[:200]!r}")


ACTS: Sequence[Callable[[Disturbances], Awaitable[None]]] = (
    Disturbances.reload,
    Disturbances.leave_reload,
    Disturbances.unload,
    Disturbances.change_version,
    Disturbances.kill,
    Disturbances.kill_frontend,
    Disturbances.rewrite_keys,
)
ACTS_OF_ROUTER = (
    Disturbances.kill_frontend,
    Disturbances.kill_replica,
    Disturbances.rewrite_keys,
)


@dataclass(slots=True)
class Questions:
    """An endless supply of requests, each with another number; those of a sequence in a row."""

    random: random.Random
    client: int
    _asked: int = 0
    _sequence: int = 0
    _open: Model | None = None
    """The models with a sequence that continues."""

    def next(self) -> Question:
        """A request of any model."""
        return self.of(self._open or self.random.choices(MODELS, WEIGHTS)[0])

    def single(self) -> Question:
        """A request of any model without sequences."""
        while (model := self.random.choices(MODELS, WEIGHTS)[0]).sequences:
            """Another one."""
        return self.of(model)

    def of(self, model: Model) -> Question:
        """A request of this model."""
        self._asked += 1
        number = (self.client * 1_000_003 + self._asked) % LARGEST
        return Question(
            model=model,
            number=number,
            id=f"{self.client}-{self._asked}",
            parameters=self._parameters(model),
        )

    def _parameters(self, model: Model) -> Mapping[str, Any]:
        if model.name == "priorities":
            return {"priority": self.random.randrange(4)}
        if not model.sequences and model.form is not Form.CHAT:
            return {}
        begins = self._open is not model
        ends = model.form is Form.CHAT or self.random.random() < 0.4
        self._sequence += begins
        self._open = None if ends else model
        identity = self.client * 1_000_000 + self._sequence
        return {"sequence_id": identity, "sequence_start": begins, "sequence_end": ends}


@dataclass(slots=True)
class Storm:
    """All clients of one run."""

    server: SoakServer
    tally: Tally
    seed: int
    tasks: Sequence[str] = ()
    _look: asyncio.Future[Sequence[str]] | None = None

    @property
    def _patience(self) -> float:
        return ANSWER_SECS + (RESTART_SECS if self.server.has_frontends else 0.0)

    async def run(self, secs: float) -> None:
        """Keep every client busy, and return when the last one has disconnected."""
        ended = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(secs, ended.set)
        try:
            async with asyncio.TaskGroup() as clients:
                clients.create_task(self._disturb(ended))
                for number in range(HTTP_CLIENTS):
                    clients.create_task(self._http(number, ended))
                for number in range(HTTP_CLIENTS, HTTP_CLIENTS + GRPC_CLIENTS):
                    clients.create_task(self._grpc(number, ended))
        finally:
            timer.cancel()
            if self._look is not None:
                self.tasks = await self._look

    async def _disturb(self, ended: asyncio.Event) -> None:
        disturbances = Disturbances(self.server, self.tally, self._random("disturbances"))
        try:
            await disturbances.run(ended)
        except TimeoutError:
            self.tally.hung.append("a load or an unload of a model")
            ended.set()
        except (Closed, OSError) as error:
            if not self.tally.cuts:
                self.tally.surprise(f"a load or an unload: {error!r}")

    async def _http(self, number: int, ended: asyncio.Event) -> None:
        random_ = self._random(number)
        keys = self.server.keys
        clients = HttpClients(self.server.ports["http"], self.tally, random_, keys, number)
        await self._act(Questions(random_, number), http_clients.ACTS, clients, ended)

    async def _grpc(self, number: int, ended: asyncio.Event) -> None:
        random_ = self._random(number)
        questions, port = Questions(random_, number), self.server.ports["grpc"]
        async with grpc_clients.connect(port) as channel:
            keys = self.server.keys
            clients = GrpcClients(
                *(channel, port, self.tally, random_, questions.single, keys, number)
            )
            await self._act(questions, grpc_clients.ACTS, clients, ended)

    async def _act(
        self, questions: Questions, acts: Acts, clients: Any, ended: asyncio.Event
    ) -> None:
        random_, names = questions.random, list(acts)
        weights = [acts[name][0] for name in names]
        while not ended.is_set():
            name = random_.choices(names, weights)[0]
            question = questions.next()
            self.tally.acts[name] += 1
            try:
                with self._watched():
                    async with asyncio.timeout(self._patience):
                        await acts[name][1](clients, question)
            except TimeoutError:
                self.tally.hung.append(f"{question.model.name} ({name})")
                ended.set()
            except Wrong as error:
                if self.tally.cuts:
                    continue
                self.tally.surprise(f"{question.model.name} ({name}): {error}")
            except ENDED as error:
                if name not in MAY_END and not self.tally.cuts:
                    self.tally.surprise(f"{question.model.name} ({name}): {error!r}")
            await asyncio.sleep(random_.random() * PAUSE_SECS)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Dump the tasks of the server, once in a run, if the block takes long."""
        timer = asyncio.get_running_loop().call_later(self._patience * LOOK_SHARE, self._note_tasks)
        try:
            yield
        finally:
            timer.cancel()

    def _note_tasks(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().run_in_executor(None, self.server.dump)

    def _random(self, name: object) -> random.Random:
        return random.Random(f"{self.seed} {name}")


WEIGHTS = [3.0 if m.name in OFTEN else RARELY.get(m.name, 1.0) for m in MODELS]


async def ask_each(server: SoakServer, within: float) -> list[str]:
    """Ask every model once; the names of those without a correct answer, with the reason."""
    found = await asyncio.gather(*(_ask(server, name, within) for name in BY_NAME))
    return [each for each in found if each]


async def _ask(server: SoakServer, name: str, within: float) -> str:
    """Retry within the time, because a restarted model refuses at first."""
    deadline, tally = time.monotonic() + within, Tally()
    questions = Questions(random.Random(name), 99)
    clients = HttpClients(server.ports["http"], tally, random.Random(name), server.keys, 0)
    while not tally.answered[name]:
        question = questions.of(BY_NAME[name])
        if question.parameters:
            question = Question(
                model=question.model,
                number=question.number,
                parameters={"sequence_id": 99, "sequence_start": True, "sequence_end": True},
            )
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                await clients.whole(question)
                if tally.answered[name]:
                    return ""
                await asyncio.sleep(0.2)
        except TimeoutError:
            why = [*tally.refusals, *tally.surprises]
            return f"{name}: {why[-1] if why else 'no answer'}"
        except http_clients.ENDED as error:
            tally.surprises.append(repr(error))
    return ""


def _loop_time(deadline: float) -> float:
    return asyncio.get_running_loop().time() + max(0.0, deadline - time.monotonic())
