"""A whole server in the loop of the sweep, and the books that it has to keep."""

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from gateway.backend import Instance
from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.in_process.options import read_settings
from gateway.in_process.server import ModelHandle
from gateway.in_process.server_loop import ServerHandle, ServerLoop
from gateway.models import model as loaded
from gateway.models.repository import Override
from gateway.rollouts.golden_recorder import (
    MOST_REQUESTS,
    MOST_SECS,
    GoldenRecorder,
    RecordingLimits,
)
from gateway.settings import Settings
from tests.sweep.holdings import Holdings, workers
from tests.sweep.questions import Question
from tests.sweep.stand_in import StandIn
from tests.sweep.steps import SteppedLoop, soon, until
from tests.sweep.subjects import BY_NAME, Contract, Subject
from tests.sweep.ways import IN_PROCESS, Client, InProcess, Way

EXIT_SECS = 2.0
"""The server's limit for requests in flight when it stops."""
STOP_SECS = EXIT_SECS + 8
"""All of a stop: answers that clients have to take, and the end of each process."""
MORTAL = ("PythonInstance", "LlmInstance", "StandIn", "VllmInstance")
OTHER = frozenset({2})
"""Another version of a model, with the files of the first."""
GRACE_SECS = 0.05
"""The time for which a resumable stream waits for its client."""


class Server:
    """One model and those it needs, explicitly loaded. Made, used and ended in a SteppedLoop.

    `uncounted` requests of earlier sweeps may still be counted.
    """

    def __init__(self, subject: Subject, options: Mapping[str, object], repository: Path) -> None:
        self.subject = subject
        self.errors = _Errors()
        self.uncounted = 0
        self._number = 0
        self._lost: list[Instance] = []
        subjects = [*(BY_NAME[name] for name in subject.needs), subject]
        for each in subjects:
            if not (repository / each.name).exists():
                each.write(repository)
        given = {
            "model_repository": repository,
            "model_control_mode": "explicit",
            "load_model": [each.name for each in subjects],
            "exit_timeout_secs": EXIT_SECS,
            "resumable_grace_secs": GRACE_SECS,
            "state_directory": repository.parent / "state",
        }
        self._folder = repository / subject.name
        self._begin(read_settings({**given, **subject.options, **options}), repository)

    def _begin(self, settings: Settings, repository: Path) -> None:
        """Begin to start."""
        self._server_loop = ServerLoop(settings)
        self._task = asyncio.create_task(self._server_loop.run())
        self._handle = ServerHandle(self._server_loop)

    async def started(self) -> "Server":
        """Wait until it is ready."""
        self.ports = await soon(
            asyncio.wrap_future(self._server_loop.started), "the server starts", 60
        )
        if self.subject.recorded:
            self._recording = asyncio.create_task(self._record())
        return self

    async def _record(self) -> None:
        """Record requests for as long as the model is loaded."""
        dataplane = self._server_loop.server.dataplane
        limits = RecordingLimits(count=MOST_REQUESTS, secs=MOST_SECS)
        while not dataplane.exiting:
            try:
                model = dataplane.model(self.subject.name)
            except InferenceError:
                return
            with GoldenRecorder(model, limits, dataplane.threads) as recorder:
                while await recorder.next() is not None:
                    pass

    @property
    def loop(self) -> SteppedLoop:
        """Its event loop."""
        assert isinstance(self._server_loop.loop, SteppedLoop)
        return self._server_loop.loop

    def question(self) -> Question:
        """A request like no other."""
        self._number += 1
        return Question(self.subject, self._number)

    def neighbour_question(self) -> Question:
        """A request that is answered."""
        found = self.question()
        if not self.subject.endless:
            return found
        return replace(found, subject=BY_NAME[self.subject.needs[0]])

    def questions(self, count: int) -> list[Question]:
        """Requests, `count` of them; of one sequence if the model is asked so."""
        found = [self.question() for _ in range(count)]
        if self.subject.endless:
            return [self.neighbour_question(), *found[:1], self.neighbour_question()][-count:]
        if not self.subject.one_sequence:
            return found
        first, last = found[0].number, found[-1].number
        return [
            replace(each, sequence=first, start=each.number == first, end=each.number == last)
            for each in found
        ]

    def ask(self, way: Way, question: Question) -> Client:
        """Send a request; the client owns it."""
        if way.name == IN_PROCESS:
            return self.ask_in_process(way, question)
        return way.ask(self.ports, question)

    def ask_in_process(self, way: Way, question: Question) -> Client:
        """Send a request in process, which submits it at once, if this model can be asked so."""
        if question.subject.contract is Contract.OPENAI:
            return way.ask(self.ports, question)
        return InProcess(ModelHandle(self._handle, question.model), question)

    # What may happen to it.

    def kill_workers(self) -> None:
        """Kill every process that runs a Python model."""
        for worker in workers():
            os.kill(worker, signal.SIGKILL)

    def lose_instances(self) -> None:
        """End every instance that can be ended: workers are killed, stand-ins die."""
        self.kill_workers()
        for instance in self._instances():
            if isinstance(instance, StandIn):
                instance.die()
        self.expect_losses()

    def expect_losses(self) -> None:
        """Have `recovered` wait until every instance that can be lost is replaced."""
        self._lost = [each for each in self._instances() if type(each).__name__ in MORTAL]

    async def recovered(self) -> None:
        """Wait until other instances have taken the place of those that ended."""
        await until(
            lambda: self.ready and not any(each in self._instances() for each in self._lost),
            lambda: "every instance that has ended is replaced",
        )
        self._lost = []
        self.errors.forget("instance died")

    async def reload(self) -> None:
        """Load the model again."""
        await self._dataplane.load(self.subject.name)

    async def unload(self) -> None:
        """Unload the model; requests that it has taken may end."""
        await self._dataplane.unload(self.subject.name)

    async def load_other(self) -> None:
        """Load another version, which gets the requests."""
        self._write_other()
        await self._dataplane.load(self.subject.name, Override(versions=OTHER))

    async def unload_other(self) -> None:
        """Unload the other version alone."""
        await self._dataplane.unload(self.subject.name, OTHER)

    async def begin_rollout(self) -> None:
        """Give half of the requests to another version."""
        self._write_other()
        steps = {"steps": [{"weight": 50, "pause": True}]}
        starting = self._dataplane.rollouts.start
        await starting(self.subject.name, *OTHER, "sweep", members=steps, again=True)

    def roll_back(self) -> None:
        """Return all requests to the first version."""
        self._dataplane.rollouts.abort(self.subject.name, "sweep")

    async def alone(self) -> None:
        """Wait until the other version is unloaded."""
        await until(
            lambda: (
                {each.version for each in self._models() if each.name == self.subject.name} == {"1"}
            ),
            lambda: "only the first version is loaded",
        )

    def _write_other(self) -> None:
        (other,) = OTHER
        shutil.copytree(self._folder / "1", self._folder / str(other), dirs_exist_ok=True)

    def begin_stop(self) -> None:
        """Begin to end."""
        self._handle.stop()

    async def ended(self) -> None:
        """Wait for the end of a server that has begun to stop."""
        await soon(asyncio.wait([self._task]), "the server ends within its limit", STOP_SECS)
        self.errors.close()
        self._task.result()

    async def stop(self) -> None:
        """End."""
        self.begin_stop()
        await self.ended()

    async def give_up(self) -> None:
        """End a server that a sweep has found broken, however that may be done."""
        self.begin_stop()
        await asyncio.wait([self._task], timeout=STOP_SECS)
        self.kill_workers()
        self._task.cancel()
        await asyncio.wait([self._task], timeout=STOP_SECS)
        self.errors.close()

    # What it has to answer for.

    @property
    def ready(self) -> bool:
        """Whether the model and those it needs serve, each with every instance."""
        wanted = {*self.subject.needs, self.subject.name}
        return wanted <= {model.name for model in self._models() if _whole(model)}

    @property
    def requests(self) -> int:
        """The requests that the models which are asked count as ended."""
        names = {self.subject.name, *(self.subject.needs if self.subject.endless else ())}
        asked = self._dataplane.models()
        counted = [model.statistics for model in asked if model.name in names]
        return sum(each.success.count + each.fail.count for each in counted)

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await until(lambda: not any(self._left()), lambda: "; ".join(self._left()))

    async def settled(self, before: Holdings) -> None:
        """Wait until nothing is left of any request."""

        def left() -> Iterator[str]:
            yield from self._left()
            yield from before.exceeded()

        await until(lambda: not any(left()), lambda: f"left behind: {'; '.join(left())}")
        self._check_books()

    @property
    def _dataplane(self) -> DataPlane:
        return self._server_loop.server.dataplane

    def _instances(self) -> list[Instance]:
        return [instance for model in self._models() for instance in model.instances]

    def _models(self) -> Iterator[loaded.Model]:
        return self._dataplane.models()

    def _left(self) -> Iterator[str]:
        if number := self._dataplane.in_flight:
            yield f"in flight: {number}"
        for model in self._models():
            if pending := model.statistics.pending:
                yield f"{model.name} has pending: {pending}"

    def _check_books(self) -> None:
        for model in self._models():
            statistics = model.statistics
            failures = sum(statistics.failures.values())
            assert statistics.fail.count == failures, f"failures by reason of {model.name}"
        assert not self.errors.lines, self.errors.lines
        assert not self.loop.trouble, self.loop.trouble


def _whole(model: loaded.Model) -> bool:
    count = sum(max(1, group.count) for group in model.config.instance_group)
    return model.ready and len(tuple(model.instances)) >= count


class _Errors(logging.Handler):
    """The errors in the log of a server."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        logging.getLogger("sluice").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.getMessage()} {record.__dict__.get('reason', '')}")

    def forget(self, text: str) -> None:
        """Those with this text were expected."""
        self.lines = [line for line in self.lines if text not in line]

    def close(self) -> None:
        logging.getLogger("sluice").removeHandler(self)
        super().close()
