"""The soak notices what it looks for: leaks, false counters, exchanged answers, late probes."""

import asyncio
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, PropertyMock

import pytest
from tritonclient.grpc import service_pb2

from gateway.policy.api_keys import ApiKeys
from loadtests.soak import requests
from loadtests.soak.http_clients import HttpClients
from loadtests.soak.keys import Keys
from loadtests.soak.models import BY_NAME
from loadtests.soak.probe import Probes, Sample
from loadtests.soak.replicas import Replicas
from loadtests.soak.requests import LOSS_SECS, Question, Refused, Route, Tally, Wrong, explained
from loadtests.soak.server import Census, SoakServer
from loadtests.soak.soak import Options, Report, accounts, while_alive
from loadtests.soak.storm import Disturbances
from tests.serving import ROOT, WAIT_SECS, wait_until

ERROR = "E1129 12:00:01.000000 1 server.py:1] instance died model=killed "
REPLICA = f"""#!/bin/sh
echo "I1129 12:00:00.000000 1 accepting.py:213] listening for=fleet port=1"
for port; do :; done
until [ -e "$0$port" ]; do sleep 0.01; done
echo "{ERROR}"
echo "   fleet  localhost:1"
exec sleep 60
"""
NOTHING = Census(processes={}, descriptors={}, tasks={}, files={}, memory_bytes=0)
WAITING = """
import asyncio, sys
from pathlib import Path
from loadtests.soak.inside import install

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


def test_more_of_anything_at_a_replica_is_a_leak() -> None:
    before = NOTHING.with_replica(1, replace(NOTHING, descriptors={"/memfd": 1, "socket": 2}))
    found = replace(NOTHING, descriptors={"/memfd": 64, "socket": 3}, tasks={"read": 1})
    assert NOTHING.with_replica(1, found).grown(before) == [
        "descriptors: 3 of socket at replica 1, 2 before",
        "tasks: 1 of read at replica 1, 0 before",
    ]


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


@pytest.mark.parametrize(
    ("text", "ago_secs", "is_explained"),
    [
        ("while it executed the request; it may have had effects", 0.0, True),
        ("after 3 tokens; not continued: its model is no engine", 0.0, True),
        ("after its first response", 2 * LOSS_SECS, False),
        ("after its first response", math.inf, False),
        ("while it executed the request", 0.0, False),
    ],
)
def test_refusals_for_a_lost_replica_are_explained_after_its_kill_only(
    text: str, ago_secs: float, is_explained: bool
) -> None:
    tally = Tally(lost_at=time.monotonic() - ago_secs)
    refusal = Refused("503", f"model 'direct': replica 0123456789abcdef was lost {text}")
    tally.refuse(Question(model=BY_NAME["direct"], number=1), refusal)
    assert bool(tally.surprises) is not is_explained


@pytest.mark.parametrize(
    "text",
    [
        "model 'direct' version 1 has no replica that takes requests (it is draining)",
        "conversation 1 of model 'direct' is not open",
        "client disconnected before the request body was complete",
    ],
)
def test_other_refusals_of_a_router_are_not_explained_by_a_kill(text: str) -> None:
    tally = Tally(lost_at=time.monotonic())
    tally.refuse(Question(model=BY_NAME["direct"], number=1), Refused("503", text))
    assert tally.surprises == [f"direct: 503 {text}"]


def test_late_probes_of_a_router_are_judged_although_replicas_were_killed() -> None:
    tally, late = Tally(lost_at=time.monotonic()), Probes([Sample(3.0, 0.0, 0.0)])
    options = Options(1.0, 1, is_router=True)
    assert Report(options, tally, late).late == "late: the server held 1 probes, one for 3.00 s"
    tally.cuts = True
    assert Report(options, tally, late).late == ""


async def test_a_replica_is_killed_once_each_has_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(REPLICA)
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    replicas = Replicas(tmp_path, tmp_path)
    try:
        server = SoakServer(tmp_path, Mock(), Mock(), replicas=replicas)
        disturbances = Disturbances(server, Tally(), random.Random(1))
        first, second = (tmp_path / f"program--fleet-port={port}" for port in replicas.processes)
        first.touch()
        wait_until(lambda: len(replicas.lines) == 4, "the first replica is ready")
        await disturbances.kill_replica()
        assert not disturbances.tally.acts
        second.touch()
        replicas.wait_ready()
        await disturbances.kill_replica()
        replicas.wait_ready()
        await disturbances.kill_replica()
        assert disturbances.tally.acts == {"kill of a replica": 1}
        (tmp_path / "log").write_text("")
        assert server.errors() == [ERROR] * 3
    finally:
        replicas.kill()


@pytest.mark.parametrize(("status", "surprises"), [(401, 0), (400, 0), (200, 1), (500, 1)])
async def test_a_wrong_key_that_is_not_refused_is_noticed(
    status: int, surprises: int, tmp_path: Path
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(f"HTTP/1.1 {status} A\r\ncontent-length: 0\r\n\r\n".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port, tally = server.sockets[0].getsockname()[1], Tally()
        clients = HttpClients(port, tally, random.Random(1), Keys(tmp_path), 1)
        await clients.wrong_key(Question(model=BY_NAME["direct"], number=1))
    assert len(tally.surprises) == surprises


def test_the_key_of_the_guest_comes_and_goes(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    guest = keys.guest.removeprefix("Bearer ").encode()
    assert ApiKeys(keys.file).find(guest, 0.0) is not None
    keys.write(with_guest=False)
    assert ApiKeys(keys.file).find(guest, 0.0) is None


async def test_a_storm_ends_with_its_server() -> None:
    deaths = iter(["", "", "the server ended with -11"])
    server = Mock(spec=SoakServer)
    type(server).death = PropertyMock(side_effect=lambda: next(deaths))
    storm = Mock()

    async def blow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            storm.ended()

    await asyncio.wait_for(while_alive(server, blow()), WAIT_SECS)
    storm.ended.assert_called_once()


def test_the_end_of_a_server_has_the_last_lines_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first\nlast\n")
    with subprocess.Popen(["sleep", "60"]) as process:
        server = SoakServer(tmp_path, process, Keys(tmp_path))
        assert server.death == ""
        process.kill()
        process.wait()
        assert server.death == "the server ended with -9\nfirst\nlast"
