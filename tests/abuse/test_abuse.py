"""Attacks and faults: none is noticed by a client that streams meanwhile, and nothing stays.

A row is a case that no other test covers; `README.md` lists all cases.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.abuse import load, management, messages, transport
from tests.abuse.scene import KEY, PROMPT, Scene
from tests.abuse.steady import ASKED, Served, SteadyClient, steady_client
from tests.certificates import Authority
from tests.children import frontends_of
from tests.conformance.models import REPEAT, identity, with_parameters
from tests.conformance.openai_models import contract, piece
from tests.conformance.test_policy_changes import ADDRESS, needs_address
from tests.rpc import infer_request
from tests.scripted import installed
from tests.serving import EVERY_SERVER, Serving, serving, wait_until, write_model

MEMORY_BYTES = 24 << 20
"""Growth of a process that holds nothing of a case, in bytes: its allocator keeps a part."""
TRIES = 3
"""And one for each frontend process, whose allocator may keep memory once.

The server's delays and growth are there in each try; those of the machine and allocator not.
"""
WITHIN_SECS = 30.0
IN_FLIGHT = re.compile(r"gateway_requests_in_flight\{")
UNEXPECTED = ("Traceback", "unexpectedly", "never retrieved", KEY, PROMPT)
"""Texts that no line of the log has."""
TALKER = """backend: "python"
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "n" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "delay_us" data_type: TYPE_INT32 dims: [ 1 ] }
]
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
instance_group { kind: KIND_CPU }
model_transaction_policy { decoupled: true }
"""
TALKER_PROGRAM = '''
"""Answers n times, delay_us microseconds apart, each request in a thread of its own."""
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.talk, args=(request,), daemon=True).start()

    def talk(self, request):
        text, n, delay_us = (pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                             for name in ("text_input", "n", "delay_us"))
        sender = request.get_response_sender()
        for _ in range(n[0]):
            if request.is_cancelled():
                break
            time.sleep(delay_us[0] / 1e6)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
FLAGS = (
    *("--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--allow-client-shm=true"),
    *("--model-control-mode=explicit", "--load-model=*", "--http-body-idle-secs=3"),
    f"--max-connections-per-address={transport.PER_ADDRESS}",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A row: its number in README.md, and the act of a client on a kind of server."""

    number: int
    act: Callable[[Scene], None]
    kind: str = "hyper"

    def __str__(self) -> str:
        function = getattr(self.act, "func", self.act)
        return f"{self.number}-{function.__name__}-{self.kind}"


CASES = (
    Case(4, transport.slow_bodies),
    Case(6, transport.bombs_over_http),
    Case(6, transport.bombs_over_grpc),
    Case(7, transport.smuggled_requests),
    Case(8, transport.resets_made_by_the_server),
    Case(8, transport.ten_thousand_streams),
    Case(8, transport.floods, "grpcio"),
    Case(11, transport.half_handshakes, "tls"),
    Case(12, messages.deep_json),
    Case(15, messages.large_bad_requests),
    Case(21, messages.classes_without_number),
    Case(23, messages.equal_ids_on_a_stream),
    Case(24, management.names_of_models),
    Case(25, management.large_loads),
    Case(35, management.markers),
    Case(36, management.labels_of_clients),
    Case(38, management.internal_memory),
    Case(50, load.tool_output),
    Case(67, load.bursts),
)
OF_AN_ADDRESS = Case(4, partial(transport.crowds_of_an_address, address=ADDRESS))


@dataclass(frozen=True, slots=True)
class Stage:
    """A running server with its steady client."""

    scene: Scene
    steady: SteadyClient


Stages = Callable[[str], Stage]


pytestmark = pytest.mark.quiet


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "two_at_once", REPEAT + with_parameters({"max_in_flight": 2}))
    write_model(folder, "echo_fp32", identity("FP32"))
    write_model(folder, "openai", contract(piece("seen"), piece(reason="stop")))
    write_model(folder, "talker", TALKER)
    (folder / "talker" / "1" / "model.py").write_text(TALKER_PROGRAM)
    return folder


@pytest.fixture(scope="module")
def stages(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    """Starts each kind of server once; however it was treated, it ends well."""
    environment = installed(tmp_path_factory.mktemp("installed"))
    found: dict[str, Stage] = {}
    with ExitStack() as stack:

        def stage(kind: str) -> Stage:
            if kind not in found:
                flags = _flags(kind, tmp_path_factory.mktemp("certificates"))
                server = stack.enter_context(
                    serving(models, *FLAGS, *flags, environment=environment)
                )
                wires = ("http",) if kind == "tls" else ("http", "grpc")
                asked = infer_request("repeat", **ASKED).SerializeToString()
                steady = stack.enter_context(steady_client(server, wires, asked))
                found[kind] = Stage(Scene(server, models), steady)
            return found[kind]

        yield stage
    for each in found.values():
        server = each.scene.server
        assert server.process.returncode == 0, server.log[-50:]
        _check_log(server.log)


def _flags(kind: str, folder: Path) -> tuple[str, ...]:
    if kind != "tls":
        return (f"--grpc-transport={kind}",)
    own = Authority(folder / "authority").issue("server")
    return (
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={own.cert}",
        f"--grpc-server-key={own.key}",
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_client_that_streams_notices_nothing(stages: Stages, case: Case) -> None:
    play(stages, case)


@needs_address
def test_a_client_that_streams_notices_no_crowd_of_another_address(stages: Stages) -> None:
    play(stages, OF_AN_ADDRESS)


def play(stages: Stages, case: Case) -> None:
    """Act, and check that nothing was noticed, and that nothing is left."""
    if case.kind == "grpcio" and "--frontends" in " ".join(EVERY_SERVER):
        pytest.skip("frontend processes have the other transport")
    stage = stages(case.kind)
    server, steady = stage.scene.server, stage.steady
    files, lines = server.open_files, len(server.log)
    most = TRIES + len(frontends_of(server.process.pid))
    tries = []
    while len(tries) < most and not (tries and tries[-1].is_harmless):
        tries.append(_try(stage, case))
        _wait_ended(stage, files)
    assert tries[-1].is_harmless, (tries, steady.calm)
    assert server.process.poll() is None
    _check_log(server.log[lines:])


@dataclass(frozen=True, slots=True)
class Try:
    """The steady client's service while a client acts, and the growth of each process in bytes."""

    served: Served
    noticed: bool
    grown: Sequence[int]

    @property
    def is_harmless(self) -> bool:
        return not self.noticed and max(self.grown) < MEMORY_BYTES


def _try(stage: Stage, case: Case) -> Try:
    server, steady = stage.scene.server, stage.steady
    memory = _resident_bytes(server)
    steady.begin()
    case.act(stage.scene)
    served = steady.measure()
    assert served.errors == []
    growth = zip(_resident_bytes(server), memory, strict=True)
    return Try(served, steady.notices(served), [now - before for now, before in growth])


def _wait_ended(stage: Stage, files: int) -> None:
    """Wait until connections and requests are those of before."""
    server, streams = stage.scene.server, stage.steady.streams
    wait_until(lambda: server.open_files <= files, "connections are closed", WITHIN_SECS)
    wait_until(lambda: _in_flight(server) == streams, "requests have ended", WITHIN_SECS)


def _in_flight(server: Serving) -> float:
    found = server.metrics().items()
    return sum(value for name, value in found if IN_FLIGHT.match(name))


def _resident_bytes(server: Serving) -> Sequence[int]:
    """Memory of the server, and of its frontend processes if it has some."""
    pids = (server.process.pid, *frontends_of(server.process.pid))
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return [int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) * 1024 for text in texts]


def _check_log(lines: list[str]) -> None:
    for text in UNEXPECTED:
        assert [line for line in lines if text in line] == []
