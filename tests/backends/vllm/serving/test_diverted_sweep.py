"""Sweeps over diverted deltas: before any step of the loop a client disconnects or the engine dies.

Streams are vLLM's and ours from the outputs of the engine on; a stand-in makes these in the loop.
"""

import asyncio
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.models import instances
from tests.backends.vllm.conftest import CONTEXT, MODEL, OPENING, Llama, engine_marks, stops_kept
from tests.serving import write_model
from tests.sweep import events
from tests.sweep.server import Server
from tests.sweep.stage import Stage
from tests.sweep.steps import SteppedLoop
from tests.sweep.subjects import ENDLESS, RESTARTS, Contract, Subject, parameters
from tests.sweep.sweep import Choice, Ground, Scene, check_another, play, sweep_disconnects
from tests.sweep.ways import IN_PROCESS, Client, Way

pytestmark = [pytest.mark.sweep, *(mark for mark in engine_marks if mark.name != "asyncio")]

STEPS = 6
TURNS = 4
"""Turns of the loop between two steps of the engine; no output waits for longer to be read."""
SCENES = {IN_PROCESS: 40}
OTHERS = 16
DEATHS = 36
STOPPED = "its engine has stopped"
TEXT = re.compile(r"v\d+")
ENDLESS_REQUEST = re.compile(r"endless_deltas-\d")
"""The id of a request that is not of a warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSubject(Subject):
    """A model of vLLM; its engine says the text of a request again, once in each step."""

    def write(self, repository: Path) -> None:
        write_model(repository, self.name, self.text)
        settings = f'{{"model": "{MODEL}", "max_model_len": {CONTEXT}}}'
        (repository / self.name / "1" / "model.json").write_text(settings)


VLLM = {
    "text": 'backend: "vllm"\n' + parameters(**RESTARTS),
    "decoupled": True,
    "responses": STEPS,
}
SUBJECTS = (
    VllmSubject(name="deltas", streams=True, **VLLM),
    VllmSubject(name="endless_deltas", streams=True, **{**VLLM, **ENDLESS}),
    VllmSubject(name="chunks", contract=Contract.OPENAI, **VLLM),
)


class StandInCore:
    """Takes the place of the processes of an engine, whose steps are callbacks of the loop.

    `running` has the requests that are neither finished nor aborted, with their tokens and steps.
    `diverted` are the deltas of each request for which they may be diverted.
    """

    def __init__(self, llm: Any) -> None:
        self.running: dict[str, tuple[list[int], int]] = {}
        self.diverted: list[Any] = []
        self._error: Exception | None = None
        self._reader: asyncio.Future[None]
        self._llm = llm
        self._turns = 0

    @property
    def is_idle(self) -> bool:
        """Whether neither it nor vLLM's client has a request."""
        return not self.running and not self._llm.output_processor.request_states

    async def add(self, request: Any) -> None:
        """As `add_request_async` of an engine's client."""
        tokenizer = self._llm.get_tokenizer()
        found = TEXT.findall(tokenizer.decode(request.prompt_token_ids)) or [""]
        tokens = tokenizer.encode(found[-1], add_special_tokens=False) or [0]
        if not self.running:
            self._turns = 0
            asyncio.get_running_loop().call_soon(self._turn)
        self.running[request.request_id] = tokens, 0

    def die(self, error: Exception, *, within_step: bool) -> None:
        """Fail all requests, now or within the next step: some have their outputs of it."""
        self._error = error
        if not (within_step and self.running):
            self._end()

    async def start(self, *_: object) -> Any:
        """As `start_engine`; the client is that of the engine before, without its requests."""
        self._error, self._reader = None, asyncio.get_running_loop().create_future()
        resources = self._llm.engine_core.resources
        resources.engine_dead, resources.output_queue_task = False, self._reader
        processor = self._llm.output_processor
        processor.abort_requests([*processor.request_states], internal=True)
        return self._llm

    async def abort(self, requests: list[str]) -> None:
        """As `abort_requests_async`."""
        for request in requests:
            self.running.pop(request, None)

    def _turn(self) -> None:
        self._turns += 1
        if self._turns % TURNS == 0:
            self._step()
        if self.running:
            asyncio.get_running_loop().call_soon(self._turn)
        elif self._error is not None:
            self._end()

    def _step(self) -> None:
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        outputs = []
        for request, (tokens, steps) in list(self.running.items()):
            self.running[request] = tokens, steps + 1
            ends = steps + 1 == STEPS and not ENDLESS_REQUEST.match(request)
            if ends:
                del self.running[request]
            reason = FinishReason.LENGTH if ends else None
            outputs.append(EngineCoreOutput(request, list(tokens), finish_reason=reason))
        if self._error is not None:
            outputs = outputs[: len(outputs) // 2]
        self._llm.output_processor.process_outputs(outputs, time.monotonic())
        if self._error is not None:
            self.running.clear()

    def _end(self) -> None:
        """As vLLM's client, when it finds that the engine has died."""
        if not self._reader.done():
            self._reader.set_result(None)
            self.running.clear()
            self._llm.engine_core.resources.engine_dead = True
            self._llm.output_processor.propagate_error(self._error)


@pytest.fixture
def core(llama: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCore]:
    """The stand-in; models of vLLM that are loaded have the engine of the other tests."""
    from backends.vllm.diverted_deltas import divert

    found = StandInCore(llama.llm)

    def note(*arguments: Any) -> Any:
        deltas = divert(*arguments)
        if deltas is not None:
            found.diverted.append(deltas)
        return deltas

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(instances, "FIRST_BACKOFF_SECS", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(llama.llm.engine_core, "add_request_async", found.add)
    monkeypatch.setattr(llama.llm.engine_core, "abort_requests_async", found.abort)
    monkeypatch.setattr(f"{OPENING}.start_engine", found.start)
    monkeypatch.setattr("backends.vllm.engine_request.divert", note)
    for name in ("engine_dead", "output_queue_task"):
        resources = llama.llm.engine_core.resources
        monkeypatch.setattr(resources, name, getattr(resources, name))  # restored after the test
    with stops_kept():
        yield found


@pytest.fixture
def choice(request: pytest.FixtureRequest) -> Choice:
    """The steps of the sweep."""
    options = request.config.getoption
    return Choice(str(options("--sweep-seed")), options("--every-step"))


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_a_client_may_disconnect_at_every_step(
    core: StandInCore, subject: Subject, choice: Choice, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    async def sweep() -> None:
        async with Stage(subject, "", tmp_path) as stage:
            for way in stage.ways:
                with subtests.test(way=str(way)):
                    limit = SCENES.get(way.name, OTHERS)
                    assert await sweep_disconnects(await stage.server(), way, choice, limit)
                    assert any(each.count for each in core.diverted) == way.streams
                    core.diverted.clear()
                    assert core.is_idle

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(sweep())


@pytest.mark.parametrize("subject", SUBJECTS[::2], ids=str)
def test_an_engine_may_die_at_every_step(
    core: StandInCore, subject: Subject, choice: Choice, tmp_path: Path
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    async def die(server: Server, way: Way, scene: Scene, ground: Ground) -> bool:
        def happen(_: Client) -> None:
            error = ValueError("malformed") if scene.stalled else EngineDeadError()
            core.die(error, within_step=scene.stalled)
            server.expect_losses()

        played = await play(server, way, scene, happen)
        events.check_each(played, lambda error: STOPPED in error)
        await server.recovered()
        await server.settled(ground.held)
        await check_another(server, way)
        await server.settled(ground.held)
        assert core.is_idle
        return played.fired

    async def sweep() -> None:
        async with Stage(subject, "", tmp_path) as stage:
            assert await events.sweep(stage, choice, DEATHS, die)
            assert any(each.count for each in core.diverted)

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(sweep())
