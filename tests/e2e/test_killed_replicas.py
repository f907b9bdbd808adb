"""A replica with the real model is killed while a router streams its texts to clients.

Each text is compared with that of an undisturbed run at the other replica.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.doors import CHAT, COMPLETIONS, GENERATE, Door, texts
from tests.e2e.figures import IN_FLIGHT
from tests.e2e.llama import ANSWER_SECS, DTYPE, write_llama
from tests.e2e.processes import Processes
from tests.fork_server import forked_with_engines
from tests.serving import Serving, replica, running, static_fleet

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

ENGINE = {
    "dtype": DTYPE,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 128 << 20,
}
LIMIT = {"max_tokens": 64}
MIDDLE = 10
"""The parts that each text has at least when the replica is killed; later, most have more."""
GREEDY = {**LIMIT, "temperature": 0}
UNSAFE: Mapping[str, Mapping[str, Any]] = {
    "seed": {**LIMIT, "temperature": 1, "seed": 7},
    "presence_penalty": {**GREEDY, "presence_penalty": 1},
}
"""Parameters of texts that are not continued, by the one that prevents it."""
QUESTIONS = (
    (GENERATE, "Once upon a time"),
    (GENERATE, "The old house at the end of the road"),
    (COMPLETIONS, "The garden behind the school was"),
    (COMPLETIONS, "On a cold winter morning"),
    (CHAT, "Why do people like music? Answer in one paragraph."),
    (CHAT, "What is a library? Answer in one paragraph."),
)
"""Of each door one goes to either replica, as the two of UNSAFE do."""
OTHER_TOKENS = re.compile(r"\n|\d|\s\s")
"""In no answer to them: between two of these a text may be cut into other tokens, whose rest is
another one, and behind white space a conversation is not continued."""
ORPHANED_SECS = 30.0


class Tale:
    """A stream of text: its parts so far, its usage, and its error."""

    def __init__(self, door: Door, text: str, sampling: Mapping[str, Any]) -> None:
        self.error = ""
        self.pieces: list[str] = []
        self.continued = 0
        self.usage: Mapping[str, int] = {}
        self.is_half = asyncio.Event()
        self._path = door.path
        self._body = door.body(text, **sampling)
        if door is not GENERATE:
            self._body["stream_options"] = {"include_usage": True}

    @property
    def text(self) -> str:
        """All of it that has come."""
        return "".join(self.pieces)

    async def read(self, client: httpx.AsyncClient) -> None:
        """Read the stream to its end."""
        async with client.stream("POST", self._path, json=self._body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self._take(line)

    def _take(self, line: str) -> None:
        event = json.loads(line.removeprefix("data: "))
        if error := event.get("error"):
            self.error = error if isinstance(error, str) else error["message"]
            return
        self.pieces += filter(None, texts(line.encode()))
        self.continued += event.get("continued", 0)
        self.usage = event.get("usage") or self.usage
        if len(self.pieces) >= MIDDLE:
            self.is_half.set()


class Tales:
    """Streams of all questions: greedy ones, and unsafe ones by the parameter that they have."""

    def __init__(self) -> None:
        self.greedy = [Tale(*each, GREEDY) for each in QUESTIONS]
        self.unsafe = {name: Tale(*QUESTIONS[0], sampling) for name, sampling in UNSAFE.items()}


@dataclass(frozen=True, slots=True)
class Loss:
    """The texts of a run in which a replica was killed, and those of an undisturbed one.

    `lost` is the number of its streams.
    """

    cut: Tales
    lost: int
    whole: Tales


@pytest.fixture(scope="module")
def loss(stored_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loss]:
    """Kill a replica of two in the middle of the texts."""
    repository, nothing = (tmp_path_factory.mktemp(each) for each in ("repository", "nothing"))
    write_llama(repository, ENGINE)
    with (
        replica(repository, "llama", start=forked_with_engines) as killed,
        replica(repository, "llama", start=forked_with_engines) as kept,
        running(Serving(nothing, [static_fleet(killed, kept)])) as router,
    ):
        engine = Processes(killed)
        yield asyncio.run(_lose(router, killed, kept))
        engine.wait_none(ORPHANED_SECS)
        assert "Traceback" not in router.text + kept.text
    assert (router.process.returncode, kept.process.returncode) == (0, 0)


async def _lose(router: Serving, killed: Serving, kept: Serving) -> Loss:
    async with httpx.AsyncClient(base_url=router.http, timeout=ANSWER_SECS) as client:
        cut, whole = Tales(), Tales()
        reading = [asyncio.ensure_future(each.read(client)) for each in cut.unsafe.values()]
        # Both replicas are new: each gets one of the two, and a half of the others.
        await asyncio.to_thread(router.wait_metric, IN_FLIGHT, "llama", len(reading))
        reading += [asyncio.ensure_future(each.read(client)) for each in cut.greedy]
        for tale in (*cut.unsafe.values(), *cut.greedy):
            async with asyncio.timeout(ANSWER_SECS):
                await tale.is_half.wait()
        lost = int(killed.metric(IN_FLIGHT, "llama"))
        killed.process.kill()
        await asyncio.gather(*reading)
        await asyncio.gather(
            *(each.read(client) for each in (*whole.unsafe.values(), *whole.greedy))
        )
    return Loss(cut, lost, whole)


def test_greedy_texts_of_a_killed_replica_are_continued_as_in_an_undisturbed_run(
    loss: Loss,
) -> None:
    greedy = loss.cut.greedy
    assert not any(OTHER_TOKENS.search(each.text) for each in loss.whole.greedy)
    assert [each.error for each in greedy] == [""] * len(greedy)
    assert [each.text for each in greedy] == [each.text for each in loss.whole.greedy]
    assert [each.usage for each in greedy] == [each.usage for each in loss.whole.greedy]
    assert {each.continued for each in greedy} == {0, 1}
    assert sum(each.continued for each in greedy) == loss.lost - 1
    assert not any(each.continued for each in loss.whole.greedy)


def test_a_seeded_or_penalised_text_of_a_killed_replica_ends_with_its_tokens_and_the_reason(
    loss: Loss,
) -> None:
    cut, whole = loss.cut.unsafe, loss.whole.unsafe
    ((parameter, ended),) = [pair for pair in cut.items() if pair[1].error]
    assert "was lost after" in ended.error
    assert "tokens were sent" in ended.error
    assert f"not continued: the request has '{parameter}'" in ended.error
    assert whole[parameter].text.startswith(ended.text)
    assert len(ended.text) < len(whole[parameter].text)
    for name, other in cut.items():
        assert other is ended or other.text == whole[name].text
        assert not other.continued
