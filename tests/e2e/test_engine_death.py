"""Death of an engine: its requests fail at once, it is restarted, all else is still served."""

import json
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conformance.models import identity
from tests.e2e.doors import CHAT, COMPLETIONS, DOORS, GENERATE
from tests.e2e.figures import IN_FLIGHT, figures
from tests.e2e.llama import ANSWER, ENDLESS, FRANCE, QUESTION, Llama, streamed, write_llama
from tests.e2e.processes import ENGINE, WORKER, Processes, title
from tests.fork_server import forked_with_engines, fresh
from tests.raw import Connection
from tests.rpc import StreamRpc, connected, streaming
from tests.serving import START_SECS, WAIT_SECS, Serving, http_get, running, wait_until, write_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(480),
    pytest.mark.own_models("the processes of engines"),
]

NOTICED_SECS = 2.0
ORPHANED_SECS = 30.0
"""A process sees that its gateway has gone once it has imported vLLM."""
SPAWNED = "multiprocessing.spawn"
"""The title of a process that an engine has started, until it has imported vLLM."""
STORY = streamed("Once upon a time", **ENDLESS)
WIRES = ("generate_stream", "chat", "completions", "ModelStreamInfer", "generate")
STREAMS = 4
"""The clients of each of them."""
BEGUN = 4
"""The responses that a client has read when the engine is killed: later deltas are diverted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """The observations when an engine was killed under the requests of many clients.

    `noticed_secs` is how long the model, or the server, was still called ready. `meanwhile` has
    the status of other requests while the engine was away, `refusals` the answers to those for it,
    by the door.
    `killed` and `back` are the processes of the engine before and after, `left` those that outlived
    the gateway, which was killed in the end.
    """

    errors: Mapping[str, Sequence[str]]
    noticed_secs: float
    meanwhile: Mapping[str, int]
    refusals: Mapping[str, httpx.Response]
    answer: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    killed: Sequence[int]
    back: Sequence[int]
    left: Mapping[int, str]


@pytest.fixture(scope="module")
def incident(stored_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Incident:
    """Kill an engine, wait for its return, and kill the gateway."""
    with two_models(tmp_path_factory.mktemp("repository")) as server, Llama(server) as llama:
        llama.expect_answer()
        processes = Processes(server)
        before, killed = figures(server), processes.engines()
        errors, noticed_secs = kill_under_requests(server, processes.titled(ENGINE))
        refusals = {
            "v2": llama.post("/generate", FRANCE),
            "openai": httpx.post(f"{server.http}{CHAT.path}", json={"messages": QUESTION}),
        }
        meanwhile = {"live": status(server, "/v2/health/live"), "echo": ask_echo(server)}
        wait_until(lambda: ready(server), "the engine is back", START_SECS)
        after, back = figures(server), processes.engines()
        answer = llama.generate(**FRANCE)["text_output"]
        server.process.kill()
        return Incident(
            errors=errors,
            noticed_secs=noticed_secs,
            meanwhile=meanwhile,
            refusals=refusals,
            answer=answer,
            before=before,
            after=after,
            killed=killed,
            back=back,
            left=left_over(processes),
        )


@pytest.mark.parametrize("wire", WIRES)
def test_requests_of_a_killed_engine_end_with_a_clear_error(incident: Incident, wire: str) -> None:
    assert len(incident.errors[wire]) == STREAMS
    for error in incident.errors[wire]:
        assert "model 'llama'" in error
        assert "its engine has stopped" in error


def test_nothing_is_called_ready_once_an_engine_has_died(incident: Incident) -> None:
    assert incident.noticed_secs < NOTICED_SECS


@pytest.mark.parametrize("door", ["v2", "openai"])
def test_requests_are_refused_until_the_engine_is_back(incident: Incident, door: str) -> None:
    refusal = incident.refusals[door]
    assert refusal.status_code == 503
    assert refusal.headers["retry-after"]
    error = refusal.json()["error"]
    message = error["message"] if door == "openai" else error
    assert "its engine has stopped" in message
    assert "restart" in message


def test_other_models_are_served_while_an_engine_is_away(incident: Incident) -> None:
    assert incident.meanwhile == {"live": 200, "echo": 200}


def test_a_restarted_engine_gives_the_same_answer(incident: Incident) -> None:
    assert incident.answer == ANSWER


def test_statistics_outlive_an_engine(incident: Incident) -> None:
    counted = incident.before["nv_inference_request_success"]
    assert incident.after["nv_inference_request_success"] == counted == 1
    assert incident.after["BACKEND"] == STREAMS * len(WIRES)
    assert incident.after["gateway_requests_in_flight"] == 0


def test_no_process_of_a_killed_engine_is_left(incident: Incident) -> None:
    assert len(incident.killed) == len(incident.back) >= len((ENGINE, WORKER))
    assert not set(incident.killed) & set(incident.back)


def test_an_engine_ends_when_its_gateway_is_killed(incident: Incident) -> None:
    assert incident.left == {}


def test_an_engine_without_tries_left_is_given_up(ended_other_server: Serving) -> None:
    server = ended_other_server
    with Llama(server) as llama:
        processes = Processes(server)
        errors, noticed_secs = kill_under_requests(server, processes.titled(WORKER))
        assert noticed_secs < NOTICED_SECS
        server.wait_logged("model given up")
        refusal = llama.post("/generate", FRANCE)
        for error in chain.from_iterable(errors.values()):
            assert "its engine has stopped" in error
        assert refusal.status_code == 503
        assert "given up after 0 restarts" in refusal.json()["error"]
        assert status(server, "/v2/models/llama/ready") == 503
        assert ask_echo(server) == 200
        processes.wait_none(ORPHANED_SECS)
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("stage", "flags"),
    [
        pytest.param(SPAWNED, ("--frontends=2",), id="its first process"),
        pytest.param(WORKER, (), id="its worker"),
    ],
)
@pytest.mark.release
def test_an_engine_ends_when_its_gateway_is_killed_at_its_start(
    stored_model: Path, tmp_path: Path, stage: str, flags: Sequence[str]
) -> None:
    """With processes for connections, the engine has clients that are processes, too.

    A process may have to import vLLM first, for which the gateway needed no less processor time.
    """
    write_llama(tmp_path)
    server = Serving(tmp_path, flags, start=fresh)
    try:
        processes = Processes(server)
        wait_until(lambda: bool(processes.titled(stage)), "it starts", START_SECS)
        imported_secs = spent_secs(server.process.pid)
    finally:
        server.process.kill()
    wait_until(
        lambda: all(spent_secs(pid) >= imported_secs for pid in processes.engines()),
        "its processes have imported vLLM, or ended",
        START_SECS,
    )
    assert left_over(processes) == {}
    server.wait_ended()


def spent_secs(pid: int) -> float:
    """The processor time of a process; endless if it has ended."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.NoSuchProcess:
        return math.inf


def kill_under_requests(
    server: Serving, process: Sequence[int]
) -> tuple[dict[str, list[str]], float]:
    """Kill the process of an engine under requests: their errors, and when it was noticed."""
    (pid,) = process
    with ExitStack() as stack:
        streams = {door.prompt: connections(stack, server) for door in DOORS}
        whole = connections(stack, server)
        rpcs = [stack.enter_context(rpc_of(server)) for _ in range(STREAMS)]
        for door in DOORS:
            for connection in streams[door.prompt]:
                connection.ask(door.path, door.body(**ENDLESS))
        for connection in whole:
            connection.ask("/v2/models/llama/generate", {**STORY.body, "stream": False})
        for rpc in rpcs:
            rpc.ask(STORY.message)
        for connection in chain.from_iterable(streams.values()):
            connection.head()
            assert all(connection.chunk() for _ in range(BEGUN))
        assert not any(rpc.answer().error_message for rpc in rpcs for _ in range(BEGUN))
        server.wait_metric(IN_FLIGHT, "llama", STREAMS * len(WIRES))
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not ready(server), "it is not ready", WAIT_SECS)
        noticed_secs = time.monotonic() - began
        errors = {
            "generate_stream": [last_event(each) for each in streams[GENERATE.prompt]],
            "chat": [last_error(each) for each in streams[CHAT.prompt]],
            "completions": [last_error(each) for each in streams[COMPLETIONS.prompt]],
            "ModelStreamInfer": [last_message(each) for each in rpcs],
            "generate": [str(each.answer().json["error"]) for each in whole],
        }
        return errors, noticed_secs


def connections(stack: ExitStack, server: Serving) -> list[Connection]:
    """Connections that are closed with the stack."""
    return [stack.enter_context(Connection(server.ports["http"])) for _ in range(STREAMS)]


@contextmanager
def rpc_of(server: Serving) -> Iterator[StreamRpc]:
    """A ModelStreamInfer on a connection of its own."""
    with connected(server.grpc) as stub, streaming(stub) as rpc:
        yield rpc


def left_over(processes: Processes) -> dict[int, str]:
    """The processes of engines that have not ended in time, with their titles."""
    with suppress(AssertionError):
        processes.wait_none(ORPHANED_SECS)
    return {pid: title(pid) for pid in processes.engines()}


@contextmanager
def two_models(repository: Path) -> Iterator[Serving]:
    """A server with the real model, and one that needs no engine."""
    write_llama(repository)
    write_model(repository, "echo", identity("BYTES", "1"))
    with running(Serving(repository, start=forked_with_engines)) as server:
        yield server


def last_event(connection: Connection) -> str:
    """The error that ends a stream of events."""
    *_, last = iter(connection.chunk, b"")
    return str(json.loads(last.split(b"data: ")[-1])["error"])


def last_error(connection: Connection) -> str:
    """The error at the end of a stream of OpenAI's."""
    *_, last, done = b"".join(iter(connection.chunk, b"")).strip().split(b"\n\n")
    assert done == b"data: [DONE]"
    return str(json.loads(last.removeprefix(b"data: "))["error"]["message"])


def last_message(rpc: StreamRpc) -> str:
    """The error of a request on a gRPC stream, which stays open."""
    while not (message := rpc.answer().error_message):
        assert not rpc.ended
    return str(message)


def ready(server: Serving) -> bool:
    """Whether the model, or the server, calls itself ready."""
    paths = ("/v2/models/llama/ready", "/v2/health/ready")
    return any(status(server, path) == 200 for path in paths)


def status(server: Serving, path: str) -> int:
    """The status of a page."""
    return http_get(server.ports["http"], path)[0]


def ask_echo(server: Serving) -> int:
    """The status of a request to the model that needs no engine."""
    url = f"{server.http}/v2/models/echo/generate"
    return httpx.post(url, json={"INPUT": "x"}, timeout=NOTICED_SECS).status_code
