"""Replicas and routers that are killed or stopped while they generate texts.

Each text is compared with that of an undisturbed run.
"""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance.models import with_parameters
from tests.leaving import IN_FLIGHT
from tests.serving import (
    WAIT_SECS,
    Serving,
    replica,
    serving,
    static_fleet,
    wait_until,
    write_model,
)
from tests.stories import (
    CONTINUING,
    FEW_TOKENS,
    GENERATE,
    STREAMS,
    TOKENS,
    check_whole,
    tell,
)
from tests.telling import TELLING, conversation, told

TALKS = 8
MESSAGES = '{ name: "messages" data_type: TYPE_STRING dims: [1] optional: true },'
DEADLY = f"""backend: "python"
input [ {{ name: "TEXT" data_type: TYPE_STRING dims: [1] }} ]
output [ {{ name: "SAID" data_type: TYPE_STRING dims: [1] }} ]
{with_parameters({"replay": "true"})}"""
DEADLY_CODE = """
import os
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb.get_input_tensor_by_name(each, "TEXT") for each in requests]
        if any(text.as_numpy()[0] == b"die" for text in texts):
            os._exit(1)
        said = [pb.Tensor("SAID", text.as_numpy()) for text in texts]
        return [pb.InferenceResponse(output_tensors=[each]) for each in said]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses") / "models"
    telling = TELLING.replace("input [", f"input [ {MESSAGES}", 1)
    write_model(folder, "story", telling + with_parameters(CONTINUING))
    write_model(folder, "deadly", DEADLY)
    (folder / "deadly" / "1" / "model.py").write_text(DEADLY_CODE)
    return folder


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository without models."""
    return tmp_path_factory.mktemp("nothing")


@pytest.fixture(scope="module")
def pair(models: Path, environment: dict[str, str]) -> Iterator[tuple[Serving, Serving]]:
    with (
        replica(models, "*", environment=environment) as first,
        replica(models, "*", environment=environment) as second,
    ):
        yield first, second
        assert "Traceback" not in first.text + second.text


@pytest.fixture(scope="module")
def router(nothing: Path, pair: tuple[Serving, Serving]) -> Iterator[Serving]:
    with serving(nothing, static_fleet(*pair)) as started:
        yield started
    assert started.process.returncode == 0, started.log[-50:]
    assert "Traceback" not in started.text


class Talk:
    """A conversation; `said` is what its completed turns have said."""

    def __init__(self, number: int) -> None:
        self.said: list[dict[str, str]] = []
        self.error = ""
        self._id = f"talk {number}"

    async def turn(self, client: httpx.AsyncClient, text: str, tokens: int) -> None:
        """Have a turn, and check its answer; `error` is that of a failed one."""
        asked = [{"role": "user", "content": text}]
        body = {"messages": asked, "sequence_id": self._id, "sequence_start": not self.said}
        body |= {"stream": True, "max_tokens": tokens}
        answer, self.error = "", ""
        async with client.stream("POST", GENERATE, json=body) as events:
            async for line in events.aiter_lines():
                event = json.loads(line.removeprefix("data: ") or "{}")
                answer += event.get("text_output", "")
                self.error += event.get("error", "")
        if not self.error:
            whole = [*self.said, *asked]
            assert answer == told(conversation({"messages": whole}), tokens)
            self.said = [*whole, {"role": "assistant", "content": answer}]


async def test_a_request_that_kills_every_instance_it_meets_is_refused_and_others_are_not_affected(
    router: Serving, pair: tuple[Serving, Serving]
) -> None:
    def ask(text: str) -> httpx.Response:
        given = {"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": [text]}
        path = f"{router.http}/v2/models/deadly/infer"
        return httpx.post(path, json={"inputs": [given]}, timeout=WAIT_SECS)

    answers: list[httpx.Response] = []
    stories = await tell(router, 4, lambda: answers.extend([ask("die"), ask("die")]))
    assert check_whole(stories) == 0
    for each in answers:
        assert each.status_code == 400
        assert "2 replicas or instances were lost" in each.json()["error"]
    for each in pair:
        each.wait_logged("instance restarted")
    wait_until(lambda: ask("live").status_code == 200, "an answer")


async def test_texts_of_a_stopped_replica_are_continued_and_its_late_ones_are_dropped(
    router: Serving, pair: tuple[Serving, Serving]
) -> None:
    stopped: list[Serving] = []

    def stop_busier() -> None:
        stopped.append(max(pair, key=lambda each: each.metric(IN_FLIGHT, "story")))
        stopped[0].process.send_signal(signal.SIGSTOP)

    try:
        stories = await tell(router, 6, stop_busier, FEW_TOKENS)
    finally:
        for each in stopped:
            each.process.send_signal(signal.SIGCONT)
    assert check_whole(stories) > 0
    router.wait_logged("it has sent nothing for 10 s")
    stopped[0].wait_metric(IN_FLIGHT, "story", 0)
    assert check_whole(await tell(router, 6, lambda: None, FEW_TOKENS)) == 0


async def test_texts_of_a_killed_replica_are_continued_and_so_are_its_conversations(
    models: Path, nothing: Path, environment: dict[str, str]
) -> None:
    # Both are new: of one with a measured rate the other would get few requests.
    with (
        replica(models, "story", environment=environment) as kept,
        replica(models, "story", environment=environment) as killed,
        serving(nothing, static_fleet(kept, killed)) as server,
    ):
        async with httpx.AsyncClient(base_url=server.http, timeout=WAIT_SECS) as client:
            talks = [Talk(number) for number in range(TALKS)]
            await asyncio.gather(*(each.turn(client, "one", 2) for each in talks))
            lost = asyncio.gather(*(each.turn(client, "two", TOKENS) for each in talks))
            stories = await tell(server, STREAMS, killed.process.kill)
            await lost
            failed = [each.error for each in talks if each.error]
            assert all("was lost after" in each and "not continued" in each for each in failed), (
                failed
            )
            assert [len(each.said) for each in talks] == [2 if each.error else 4 for each in talks]
            await asyncio.gather(*(each.turn(client, "three", 2) for each in talks))
            assert not any(each.error for each in talks)
    assert 0 < check_whole(stories) < STREAMS
