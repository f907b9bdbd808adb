"""Workers that crash, hang, flood and fork, over both wires: no other model is affected."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.conformance.clients import Client, connect
from tests.conformance.models import with_parameters
from tests.serving import Serving, http_get, serving, wait_until

pytestmark = pytest.mark.own_models("loads and unloads")

FLAGS = ("--model-control-mode=explicit", "--load-model=neighbour", "--strict-readiness=false")
TEXT_TO_TEXT = """
backend: "python"
input { name: "deed" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "told" data_type: TYPE_STRING dims: [ 1 ] }
instance_group { kind: KIND_CPU }
"""
BATCHES = "max_batch_size: 4\ndynamic_batching { max_queue_delay_microseconds: 500000 }\n"
DEEDS = """
import ctypes, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


def burst():
    for _ in range(200_000):
        print("a line of many")
    return "printed"


def shriek():
    print("x" * 10_000_000)
    return "shrieked"


def fork():
    child = os.fork()
    if not child:
        time.sleep(600)
    return str(child)


def swallow():
    return str(len(bytearray(3 << 30)))


DEEDS = {
    "pid": lambda: str(os.getpid()),
    "exit": lambda: os._exit(3),
    "fail": lambda: ctypes.string_at(0),
    "sleep": lambda: time.sleep(600),
    "clutch": lambda: ctypes.PyDLL(None).sleep(600),
    "raise": lambda: [][1],
    "burst": burst,
    "shriek": shriek,
    "fork": fork,
    "swallow": swallow,
}


class TritonPythonModel:
    def initialize(self, args):
        print("initialized", args["model_instance_name"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        deed = request.inputs()[0].as_numpy().reshape(-1)[0].decode()
        shape = request.inputs()[0].shape()
        told = np.array([str(DEEDS[deed]()).encode()], dtype=np.object_).reshape(shape)
        return pb_utils.InferenceResponse([pb_utils.Tensor("told", told)])

    def finalize(self):
        print("finalized")
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model under several names, so that no test uses up the restarts of another."""
    folder = tmp_path_factory.mktemp("python")
    for wire in ("http", "grpc"):
        for name in ("exit", "fail", "killed", "fork", "flood", "poison"):
            add(folder, f"{name}_{wire}")
        add(folder, f"patient_{wire}", abandoned_execute_secs=0.5)
        add(folder, f"limited_{wire}", execute_timeout_secs=0.5)
        add(folder, f"watched_{wire}", health_check_secs=0.2)
        add(folder, f"small_{wire}", worker_memory_limit_mb=1024)
        add(folder, f"batched_{wire}", more=BATCHES)
        add(folder, f"sick_{wire}", code=SICK)
    add(folder, "neighbour")
    add(folder, "unparsable", code="class TritonPythonModel:\n    def")
    add(folder, "raising", code=INITIALIZE.format("raise ValueError('not today')"))
    add(folder, "leaving", code=INITIALIZE.format("__import__('os')._exit(7)"))
    add(folder, "empty", code="")
    return folder


SICK = """
import pathlib
SICK = pathlib.Path(__file__).parent / "sick"
class TritonPythonModel:
    def execute(self, requests):
        pass
    def is_ready(self):
        return not SICK.exists()
"""
INITIALIZE = """
class TritonPythonModel:
    def initialize(self, args):
        {}
"""


def add(
    repository: Path, name: str, code: str = DEEDS, more: str = "", **parameters: object
) -> None:
    (repository / name / "1").mkdir(parents=True)
    config = TEXT_TO_TEXT + more + with_parameters(parameters)
    (repository / name / "config.pbtxt").write_text(config)
    (repository / name / "1" / "model.py").write_text(code)


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Serving]:
    """A server whose models may die."""
    with serving(repository, *FLAGS) as started:
        yield started
    assert started.process.returncode == 0, started.log[-100:]
    assert "execution failed" not in started.text


@pytest.fixture(params=["http", "grpc"])
async def client(request: pytest.FixtureRequest, server: Serving) -> AsyncIterator[Client]:
    """A client of each wire; no call of it disturbs the neighbour."""
    async with connect(server, f"{request.param}.aio") as found:
        with neighbour_served(server):
            yield found


@contextmanager
def neighbour_served(server: Serving) -> Iterator[None]:
    """Ask the neighbour again and again, and expect an answer each time."""
    found: list[object] = []
    over = threading.Event()
    asking = threading.Thread(target=ask_neighbour, args=(server, over, found))
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()
    assert found
    assert set(found) == {"answered"}


def ask_neighbour(server: Serving, over: threading.Event, found: list[object]) -> None:
    client = tritonclient.http.InferenceServerClient(server.http.removeprefix("http://"))
    deed = tritonclient.http.InferInput("deed", [1], "BYTES")
    deed.set_data_from_numpy(np.array([b"pid"], dtype=np.object_))
    try:
        while not found or not over.wait(0.05):
            client.infer("neighbour", [deed])
            found.append("answered")
    except Exception as error:  # noqa: BLE001 - the test shows every error
        found.append(error)
    finally:
        client.close()


def deed(client: Client, word: str, rows: tuple[int, ...] = (1,)) -> list[Any]:
    library = tritonclient.http if client.over_http else tritonclient.grpc
    found = library.InferInput("deed", list(rows), "BYTES")
    found.set_data_from_numpy(np.full(rows, word.encode(), dtype=np.object_))
    return [found]


async def do(client: Client, model: str, word: str, rows: tuple[int, ...] = (1,)) -> str:
    result = await client.call("infer", model, deed(client, word, rows))
    return result.as_numpy("told").reshape(-1)[0].decode()


async def loaded(client: Client, model: str) -> str:
    """The name of the model that is this wire's, loaded."""
    name = f"{model}_{'http' if client.over_http else 'grpc'}"
    await client.call("load_model", name)
    return name


async def restarted(client: Client, model: str, rows: tuple[int, ...] = (1,)) -> None:
    """Wait until it serves again, as a client does that may retry."""
    async with asyncio.timeout(20):
        while not await answered(client, model, rows):  # noqa: ASYNC110 - a client has no event
            await asyncio.sleep(0.02)


async def answered(client: Client, model: str, rows: tuple[int, ...]) -> bool:
    try:
        await do(client, model, "pid", rows)
    except InferenceServerException as error:
        if str(error.status()).removeprefix("StatusCode.") != client.code("UNAVAILABLE"):
            raise
        return False
    return True


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("word", ["exit", "fail"])
async def test_a_worker_that_ends_fails_its_request_and_is_started_again(
    client: Client, word: str
) -> None:
    name = await loaded(client, word)
    code, text = await client.refusal("infer", name, deed(client, word))
    assert code == client.code("UNAVAILABLE")
    how = {"exit": "it ended with status 3", "fail": "it was ended by SIGSEGV"}[word]
    assert text == (
        f"model '{name}' failed: its worker process ended: {how}. "
        f"Stub process '{name}_0' is not healthy."
    ).replace(f"'{name}_0'", f"'{name}_0_0'")
    await restarted(client, name)


async def test_a_worker_that_is_killed_while_it_waits_is_started_again(
    client: Client, server: Serving
) -> None:
    name = await loaded(client, "killed")
    pid = int(await do(client, name, "pid"))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it has ended, and is no zombie")
    await restarted(client, name)
    assert int(await do(client, name, "pid")) != pid


async def test_a_request_that_has_ended_two_workers_is_refused(
    client: Client, server: Serving
) -> None:
    name = await loaded(client, "poison")
    for _ in range(2):
        await client.refusal("infer", name, deed(client, "exit"))
        await restarted(client, name)
    code, text = await client.refusal("infer", name, deed(client, "exit"), request_id="other")
    assert code == client.code("INVALID_ARGUMENT")
    assert "its worker ended 2 times" in text
    assert "refused for 10 minutes" in text
    assert await do(client, name, "pid")
    server.wait_logged(f'"request quarantined model={name}')


async def test_of_a_batch_that_ends_workers_only_the_guilty_is_refused(client: Client) -> None:
    name = await loaded(client, "batched")

    async def batch() -> list[str]:
        words = ("pid", "exit")
        calls = [client.call("infer", name, deed(client, word, (1, 1))) for word in words]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return ["" if not isinstance(each, Exception) else str(each) for each in found]

    first = await batch()
    assert all("is not healthy" in text for text in first)
    await restarted(client, name, (1, 1))
    _, guilty = await batch()  # both are suspects now, and execute one by one
    assert "is not healthy" in guilty
    await restarted(client, name, (1, 1))
    innocent, guilty = await batch()
    assert innocent == ""
    assert "its worker ended 2 times" in guilty


async def test_an_abandoned_execution_is_killed_at_its_limit(
    client: Client, server: Serving
) -> None:
    name = await loaded(client, "patient")
    pid = int(await do(client, name, "pid"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await do(client, name, "sleep")
    await asyncio.to_thread(wait_until, lambda: not is_alive(pid), "the worker has been killed")
    await restarted(client, name)
    server.wait_logged("abandoned_execute_secs")


async def test_an_execution_may_have_a_limit_of_time(client: Client) -> None:
    name = await loaded(client, "limited")
    code, text = await client.refusal("infer", name, deed(client, "sleep"))
    assert code == client.code("UNAVAILABLE")
    assert "its execute took longer than 0.5 s (execute_timeout_secs)" in text
    await restarted(client, name)


async def test_a_worker_that_answers_no_health_check_is_replaced(client: Client) -> None:
    name = await loaded(client, "watched")
    _, text = await client.refusal("infer", name, deed(client, "clutch"))
    assert "it did not answer a health check" in text
    await restarted(client, name)


async def test_a_worker_may_have_a_limit_of_memory(client: Client) -> None:
    name = await loaded(client, "small")
    code, text = await client.refusal("infer", name, deed(client, "swallow"))
    assert code == client.code("INTERNAL")
    began = f"Failed to process the request(s) for model '{name}_0_0', message: MemoryError"
    assert text.startswith(began)
    assert await do(client, name, "pid")


async def test_a_model_may_print_without_end(client: Client, server: Serving) -> None:
    name = await loaded(client, "flood")
    assert await do(client, name, "burst") == "printed"
    assert await do(client, name, "shriek") == "shrieked"
    server.wait_logged(f'"output lines dropped model={name}')
    lines = [line for line in server.log if "a line of many" in line and name in line]
    assert 1 <= len(lines) <= 5_000
    assert max(len(line) for line in server.log) < 20_000


async def test_forked_processes_end_with_their_worker(client: Client) -> None:
    name = await loaded(client, "fork")
    child = int(await do(client, name, "fork"))
    assert is_alive(child)
    os.kill(int(await do(client, name, "pid")), signal.SIGKILL)
    wait_until(lambda: not is_alive(child), "the child has ended")
    await restarted(client, name)


async def test_an_exception_of_execute_reaches_the_client_without_traceback_or_path(
    client: Client, repository: Path
) -> None:
    code, text = await client.refusal("infer", "neighbour", deed(client, "raise"))
    assert code == client.code("INTERNAL")
    assert text == (
        "Failed to process the request(s) for model 'neighbour_0_0', message: IndexError: "
        "list index out of range"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unparsable", "SyntaxError"),
        ("raising", "ValueError: not today"),
        ("leaving", "it ended with status 7"),
        ("empty", "TritonPythonModel"),
    ],
)
async def test_a_model_that_cannot_load_says_why(
    client: Client, repository: Path, name: str, reason: str
) -> None:
    _, text = await client.refusal("load_model", name)
    assert reason in text
    assert str(repository) not in text
    assert "Traceback" not in text


async def test_a_model_may_say_that_it_is_not_ready(
    client: Client, server: Serving, repository: Path
) -> None:
    name = await loaded(client, "sick")
    assert await client.call("is_model_ready", name)
    (repository / name / "1" / "sick").touch()
    assert not await client.call("is_model_ready", name)
    text = f"Model '{name}_0_0' is not ready (user-defined check failed)."
    server.wait_logged(f"Model '{name}' version 1 is not ready: {text}")
    if client.over_http:
        status, body = await asyncio.to_thread(
            http_get, server.ports["http"], f"/v2/models/{name}/ready"
        )
        assert status == 503
        assert text in body.decode()
    (repository / name / "1" / "sick").unlink()
    assert await client.call("is_model_ready", name)


async def test_unloading_calls_finalize_and_ends_the_worker(
    client: Client, server: Serving
) -> None:
    name = await loaded(client, "killed")
    pid = int(await do(client, name, "pid"))
    await client.call("unload_model", name)
    wait_until(lambda: not is_alive(pid), "the worker has ended")
    server.wait_logged(f'"printed: finalized" model={name}'.replace('" model', " model"))


def test_workers_end_with_a_gateway_that_is_killed(repository: Path) -> None:
    server = Serving(repository, FLAGS).wait_ready()
    client = tritonclient.http.InferenceServerClient(server.http.removeprefix("http://"))
    word = tritonclient.http.InferInput("deed", [1], "BYTES")
    found = {}
    for name in ("pid", "fork"):
        word.set_data_from_numpy(np.array([name.encode()], dtype=np.object_))
        found[name] = int(client.infer("neighbour", [word]).as_numpy("told")[0])
    client.close()
    server.stop(signal.SIGKILL)
    for name, pid in found.items():
        wait_until(lambda pid=pid: not is_alive(pid), f"{name} has ended")  # type: ignore[misc]
