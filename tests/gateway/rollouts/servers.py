"""Servers of one model in a folder, whose versions answer with their number."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import ModelConfig
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, SequenceTag
from gateway.models.model import Model
from gateway.models.repository import ModelRepository
from gateway.models.repository_control import RepositoryControl
from gateway.policy.audit import AuditLog
from gateway.rollouts.rollouts import Rollouts
from gateway.rollouts.state import StateDirectory
from gateway.settings import ModelSettings
from gateway.storage.mirror.mirror import Mirror
from gateway.tensor import text_tensor
from gateway.threads import request_threads
from tests.builders import read_all, settle, soon, text_request, text_response
from tests.registries import Backends, no_infer, write

TURNS = 2000
"""Turns of the loop until a change must have happened; each waits for threads a little."""


class Numbered(Instance):
    """Answers with the number of its version, or with an error."""

    def __init__(self, version: str, backend: "NumberedBackend") -> None:
        self.concurrency = None
        self._version = version
        self._errors = backend.errors
        self._gates = backend.gates
        self._work = backend.work
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.death = self._death

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        if (error := self._errors.get(self._version)) is not None:
            raise error
        if (gate := self._gates.get(self._version)) is not None:
            await gate.wait()
        if (work := self._work.get(self._version)) is not None:
            await work()
        for index, _ in enumerate(requests):
            yield index, text_response(self._version, final=True)

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return not self._death.done()

    def die(self) -> None:
        """Execute no more."""
        self._death.set_result("it was told to")

    async def close(self) -> None:
        """Nothing is open."""


class NumberedBackend(Backend):
    """Loads instances.

    `errors` of answers, `refusals` of loads, `gates`, at which answers wait, and the `work` before
    each answer are by version.
    """

    def __init__(self) -> None:
        self.errors: dict[str, InferenceError] = {}
        self.refusals: dict[str, InferenceError] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.work: dict[str, Callable[[], Awaitable[None]]] = {}
        self.instances: dict[str, Numbered] = {}

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        return config

    async def load(self, context: ModelContext) -> Instance:
        version = context.path.name
        if (error := self.refusals.get(version)) is not None:
            raise error
        self.instances[version] = Numbered(version, self)
        return self.instances[version]


class RolloutServer:
    """A control, a data plane and rollouts over the model `m`, until `stop`.

    `now` is the clock of its rollouts, which a test sets.
    """

    def __init__(
        self,
        folder: Path,
        state: Path | None,
        backend: NumberedBackend,
        audit: AuditLog | None = None,
        mirror: Mirror | None = None,
        **options: Any,
    ) -> None:
        self.now = 1000.0
        self.folder = folder
        settings = ModelSettings(**options)
        repository = ModelRepository((mirror or folder,))
        self.control = RepositoryControl(repository, settings, Backends(backend))
        self.dataplane = DataPlane(self.control)
        self.threads = request_threads()
        self.rollouts = self.dataplane.rollouts = Rollouts(
            *(self.control, self.dataplane.conversations, StateDirectory(state)),
            *(self.threads, audit, lambda: self.now),
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the model."""
        self._tasks = [
            asyncio.create_task(self.rollouts.run()),
            asyncio.create_task(self.control.run(no_infer, gate=self.rollouts)),
        ]
        await soon(self.control.registry.wait_settled())

    async def stop(self) -> None:
        """End, as at a SIGTERM: rollouts end while their versions are able."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await soon(task)
        self._tasks = []

    async def publish(self, version: int, **plan: Any) -> None:
        """Add a version with some file, and poll; members of `rollout.json` replace its file."""
        write(self.folder, "m", version)
        (self.folder / "m" / str(version) / "weights").write_text(str(version))
        if plan:
            self.plan(**plan)
        await soon(self.control.poll())

    def plan(self, **members: Any) -> None:
        """Write `rollout.json`."""
        (self.folder / "m" / "rollout.json").write_text(json.dumps(members))

    def touch(self, version: int) -> None:
        """Change a file of a version."""
        file = self.folder / "m" / str(version) / "weights"
        file.write_text(f"{file.read_text()} again")

    async def ask(self, version: str = "", **fields: Any) -> str:
        """The number of the version that answers; the error's code if it fails."""
        request = text_request(**{"model": "m", "version": version, **fields})
        try:
            with self.dataplane.infer(request) as stream:
                (answer,) = await soon(read_all(stream))
                assert stream.model.name != "m" or stream.model.version == answer
        except InferenceError as error:
            return error.code.name
        return answer

    async def say(self, conversation: int, *, start: bool = False) -> str:
        """The number of the version that answers a turn."""
        messages = text_tensor("messages", ['[{"role": "user", "content": "hi"}]'])
        tag = SequenceTag(conversation, start=start)
        with self.dataplane.infer(InferRequest(model="m", inputs=(messages,), sequence=tag)) as s:
            (answer,) = await soon(read_all(s))
        return answer

    async def asked(self, count: int, **fields: Any) -> set[str]:
        """The versions that answer some requests."""
        return {await self.ask(**fields) for _ in range(count)}

    def tick(self, secs: float = 0.0) -> None:
        """Let time pass."""
        self.now += secs
        self.rollouts.tick()

    @property
    def place(self) -> tuple[str, float]:
        """State and weight of the rollout."""
        found = self.rollouts.describe("m")
        return found["state"], found["weight"]

    @property
    def versions(self) -> list[str]:
        """The loaded versions."""
        return [model.version for model in self.dataplane.models() if model.name == "m"]

    def model(self, version: str) -> Model:
        """A loaded version."""
        return self.dataplane.model("m", version)

    async def until_versions(self, *versions: str) -> None:
        """Wait until exactly these versions are loaded."""
        await self.eventually(lambda: self.versions == list(versions))

    async def eventually(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, which no event tells."""
        for _ in range(TURNS):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"found the versions {self.versions}")

    async def index(self) -> dict[str, tuple[str, str]]:
        """State and reason of each version."""
        await settle()
        return {row.version: (row.state, row.reason) for row in await self.control.index()}


BROKEN = InferenceError(Code.INTERNAL, "broken")
