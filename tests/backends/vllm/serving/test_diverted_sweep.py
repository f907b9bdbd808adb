"""The sweep of disconnects over diverted deltas: a client disconnects before any step of the loop.

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

from tests.backends.vllm.conftest import CONTEXT, MODEL, OPENING, Llama, engine_marks, stops_kept
from tests.serving import write_model
from tests.sweep.stage import Stage
from tests.sweep.steps import SteppedLoop
from tests.sweep.subjects import ENDLESS, Contract, Subject
from tests.sweep.sweep import Choice, sweep_disconnects
from tests.sweep.ways import IN_PROCESS

pytestmark = [pytest.mark.sweep, *(mark for mark in engine_marks if mark.name != "asyncio")]

STEPS = 6
TURNS = 4
"""Turns of the loop between two steps of the engine; no output waits for longer to be read."""
SCENES = {IN_PROCESS: 40}
OTHERS = 16
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


VLLM = {"text": 'backend: "vllm"\n', "decoupled": True, "made": "", "responses": STEPS}
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
        self._llm = llm
        self._turns = 0

    async def add(self, request: Any) -> None:
        """As `add_request_async` of an engine's client."""
        tokenizer = self._llm.get_tokenizer()
        found = TEXT.findall(tokenizer.decode(request.prompt_token_ids)) or [""]
        tokens = tokenizer.encode(found[-1], add_special_tokens=False) or [0]
        if not self.running:
            self._turns = 0
            asyncio.get_running_loop().call_soon(self._turn)
        self.running[request.request_id] = tokens, 0

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
        self._llm.output_processor.process_outputs(outputs, time.monotonic())


@pytest.fixture
def core(llama: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCore]:
    """The stand-in; models of vLLM that are loaded have the engine of the other tests."""
    from backends.vllm.diverted_deltas import divert

    found = StandInCore(llama.llm)

    async def start(*_: object) -> Any:
        return llama.llm

    def note(*arguments: Any) -> Any:
        deltas = divert(*arguments)
        if deltas is not None:
            found.diverted.append(deltas)
        return deltas

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(llama.llm.engine_core, "add_request_async", found.add)
    monkeypatch.setattr(llama.llm.engine_core, "abort_requests_async", found.abort)
    monkeypatch.setattr(f"{OPENING}.start_engine", start)
    monkeypatch.setattr("backends.vllm.engine_request.divert", note)
    with stops_kept():
        yield found


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_a_client_may_disconnect_at_every_step(
    llama: Llama,
    core: StandInCore,
    subject: Subject,
    tmp_path: Path,
    subtests: pytest.Subtests,
    request: pytest.FixtureRequest,
) -> None:
    options = request.config.getoption
    choice = Choice(str(options("--sweep-seed")), options("--every-step"))

    async def sweep() -> None:
        async with Stage(subject, "", tmp_path) as stage:
            for way in stage.ways:
                with subtests.test(way=str(way)):
                    limit = SCENES.get(way.name, OTHERS)
                    assert await sweep_disconnects(await stage.server(), way, choice, limit)
                    assert any(each.count for each in core.diverted) == way.streams
                    core.diverted.clear()
                    assert not core.running
                    assert not llama.llm.output_processor.request_states

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(sweep())
