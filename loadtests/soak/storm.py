"""Random clients of all kinds, until the time is over or one of them hangs."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loadtests.soak import grpc_clients, http_clients
from loadtests.soak.disturbances import Disturbances
from loadtests.soak.grpc_clients import GrpcClients
from loadtests.soak.http_clients import Closed, HttpClients
from loadtests.soak.models import BY_NAME, MODELS, Form, Model
from loadtests.soak.requests import Question, Tally, Wrong
from loadtests.soak.server import SoakServer

HTTP_CLIENTS = 12
GRPC_CLIENTS = 4
ANSWER_SECS = 10.0
"""An act that takes longer hangs; reloads and restarts under load take seconds."""

RESTART_SECS = 20.0
"""A connection may wait so long for the next process where frontends are killed."""

LOOK_SHARE = 0.8
"""After this part of the time the tasks of the server are noted, while the client still waits."""

PAUSE_SECS = 0.004
LARGEST = 2**24
"""Numbers below are exact in FP32."""

Acts = Mapping[str, tuple[float, Callable[[Any, Question], Awaitable[None]]]]
OFTEN = ("dynamic", "py_direct", "py_dynamic", "business", "py_pipeline", "seq_oldest", "embed")
RARELY = {"py_large": 0.3, "large": 0.1}
ENDED = http_clients.ENDED + grpc_clients.ENDED
MAY_END = frozenset({"HTTP garbage", "HTTP half-close", "gRPC garbage"})
"""Acts after which the server may close the connection without an answer."""


@dataclass(slots=True)
class Questions:
    """An endless supply of requests, each with another number; sequences are asked in a row."""

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
        """Keep every client busy, and return when the last one has left."""
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
        clients = HttpClients(self.server.ports["http"], self.tally, random_)
        await self._act(Questions(random_, number), http_clients.ACTS, clients, ended)

    async def _grpc(self, number: int, ended: asyncio.Event) -> None:
        random_ = self._random(number)
        questions, port = Questions(random_, number), self.server.ports["grpc"]
        async with grpc_clients.connect(port) as channel:
            clients = GrpcClients(channel, port, self.tally, random_, questions.single)
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
        """Note the tasks of the server if the block takes long; once in a run."""
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
    """Ask every model once; the names of those that do not answer as they should, with why."""
    found = await asyncio.gather(*(_ask(server, name, within) for name in BY_NAME))
    return [each for each in found if each]


async def _ask(server: SoakServer, name: str, within: float) -> str:
    """A restarted model may refuse for a while: it is asked until its time is over."""
    deadline, tally = time.monotonic() + within, Tally()
    questions = Questions(random.Random(name), 99)
    clients = HttpClients(server.ports["http"], tally, random.Random(name))
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
