"""The soak notices what it looks for: leaks, false counters, exchanged answers, late probes."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2

from loadtests.soak import requests
from loadtests.soak.models import BY_NAME
from loadtests.soak.probe import Probes, Sample
from loadtests.soak.requests import Question, Refused, Route, Tally, Wrong, explained
from loadtests.soak.server import Census
from loadtests.soak.soak import accounts
from tests.serving import ROOT, wait_until

NOTHING = Census(processes={}, descriptors={}, tasks={}, files={}, memory_bytes=0)
WAITING = """
import asyncio, sys
from pathlib import Path
from loadtests.soak.server import install

async def events():
    asyncio.get_running_loop().call_soon(lambda: print("ready", flush=True))
    await asyncio.Event().wait()
    yield

async def read():
    async for _ in events():
        pass

install(Path(sys.argv[1]))
asyncio.run(read())
"""


@pytest.mark.parametrize("noun", ["processes", "descriptors", "tasks", "files"])
def test_more_of_anything_is_a_leak(noun: str) -> None:
    before = replace(NOTHING, **{noun: {"kind": 2}})
    after = replace(NOTHING, **{noun: {"kind": 3}})
    assert after.grown(before) == [f"{noun}: 3 of kind, 2 before"]
    assert before.grown(after) == []


def test_a_process_that_is_not_started_again_is_noticed() -> None:
    before = replace(NOTHING, processes={"worker a": 1})
    assert NOTHING.lost(before) == ["processes: 0 of worker a, 1 before"]


def test_segments_for_reuse_are_no_leak() -> None:
    before, after = ({"/memfd": count} for count in (3, 64))
    assert replace(NOTHING, descriptors=after).grown(replace(NOTHING, descriptors=before)) == []


def counted(success: int, failure: int = 0) -> Mapping[tuple[str, str], float]:
    return {
        ("nv_inference_request_success", "direct"): success,
        ("nv_inference_request_failure", "direct"): failure,
    }


@pytest.mark.parametrize(
    ("success", "failure", "found"),
    [
        (2, 0, []),
        (3, 1, []),
        (1, 3, ["direct counts 1 successes, clients had 2"]),
        (4, 1, ["direct counts 5 requests, clients made 4"]),
    ],
)
def test_counters_of_clients_and_server_agree(success: int, failure: int, found: list[str]) -> None:
    tally, question = Tally(), Question(model=BY_NAME["direct"], number=1)
    for _ in range(4):
        tally.ask(question)
    for _ in range(2):
        tally.answer(question)
    assert accounts(tally, counted(10, 10), counted(10 + success, 10 + failure)) == found


@pytest.mark.parametrize(
    ("sample", "late", "held"),
    [
        (Sample(0.09, 0.0, 0.0), False, False),
        (Sample(0.2, 0.0, 0.0), True, True),
        (Sample(0.2, 0.15, 0.0), True, False),
        (Sample(0.2, 0.0, 0.15), True, False),
    ],
)
def test_a_late_probe_is_the_servers_unless_the_machine_explains_it(
    sample: Sample, late: bool, held: bool
) -> None:
    assert (sample.late, sample.held) == (late, held)


def test_one_long_hold_is_not_good() -> None:
    quick = [Sample(0.001, 0.001, 0.0)] * 1000
    assert Probes([*quick, Sample(0.2, 0.0, 0.0)]).good
    assert not Probes([*quick, Sample(3.0, 0.0, 0.0)]).good


def test_an_answer_of_another_request_is_wrong() -> None:
    mine, other = (Question(model=BY_NAME["direct"], number=number) for number in (1, 2))
    request = json.loads(requests.body(other, Route.INFER))
    answer = json.dumps({"outputs": request["inputs"]}).encode()
    requests.check_infer(other, answer)
    with pytest.raises(Wrong):
        requests.check_infer(mine, answer)
    response = service_pb2.ModelInferResponse(
        raw_output_contents=requests.message(other).raw_input_contents
    )
    requests.check_message(other, 0, response)
    with pytest.raises(Wrong):
        requests.check_message(mine, 0, response)


@pytest.mark.parametrize(
    ("name", "code", "text", "is_explained"),
    [
        ("direct", "500", "internal error", False),
        ("direct", "503", "model 'direct' is unavailable", False),
        ("killed", "503", "Stub process 'killed_0_0' is not healthy.", True),
        ("reloaded", "404", "Request for unknown model: 'reloaded' is still loading", True),
        ("priorities", "503", "Request timeout expired", True),
        ("seq_direct", "400", "inference request for sequence 1 must specify the START", True),
        ("direct", "400", "inference request for sequence 1 must specify the START", False),
    ],
)
def test_a_refusal_needs_a_reason(name: str, code: str, text: str, is_explained: bool) -> None:
    refusal = Refused(code, text)
    assert explained(BY_NAME[name], refusal) is is_explained
    tally = Tally()
    tally.refuse(Question(model=BY_NAME[name], number=1), refusal)
    assert bool(tally.surprises) is not is_explained


def test_a_dump_names_the_line_where_a_task_waits(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    command = [sys.executable, "-c", WAITING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGUSR1)
            wait_until(path.exists, "the dump is written")
        finally:
            process.kill()
    assert path.read_text().startswith("read < <string>:12 read < <string>:8 events < locks.py:")


def test_refusals_for_a_lost_replica_are_explained_after_its_kill_only() -> None:
    question = Question(model=BY_NAME["direct"], number=1)
    texts = ("replica 1 was lost before its first response", "an answer of another model")
    for losses in (False, True):
        tally = Tally(losses=losses)
        for text in texts:
            tally.refuse(question, Refused("503", text))
        assert tally.surprises == [f"direct: 503 {text}" for text in texts[losses:]]
