"""Limits for the source files that a request enters on the event loop, and for its calls.

Each walk runs once to warm up, then again under a profile of the loop's thread. The files of the
last run are in the message of a failure. The server polls its repository for the walk of a poll
only, so that other walks count what their request enters.
"""

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from gateway.in_process.server import Server
from gateway.policy.keys import new_key
from gateway.protos import grpc_service_pb2 as pb
from tests import onnx_models
from tests.conformance import keys
from tests.conformance.models import REPEAT
from tests.conformance.openai_models import contract, piece
from tests.raw import Connection, post
from tests.rpc import connected, infer_request, streaming
from tests.scripted import installed
from tests.serving import ROOT, wait_until, write_model

SOURCES = (f"{ROOT}/gateway/", f"{ROOT}/backends/")
POLL_SECS = 0.2
LOAD_SECS = 30
INFER_FILES = 20
TOKEN_FILES = 10
MODEL_INFER_FILES = 26
RESPONSE_FILES = 14
CANCEL_FILES = 12
UPDATE_FILES = 10
REPLACE_FILES = 16
CHAT_FILES = 25
INFER_CALLS = 100
LIMITED_INFER_CALLS = 104
TOKEN_CALLS = 13
CHAT_TOKEN_CALLS = 15
"""These limits may fall, and not rise. A generator that continues counts as a call."""
WARM_INFERS = 30
"""Enough for executions to be known as short, so that they run on the event loop."""
TRIES = 5
"""The fewest calls of several tries count: timers of the server may run during others."""
TIMEOUT_SECS = 10.0
CANCEL_SECS = 0.4
"""Less than the delay between two responses of the cancelled request."""
ADD_SUB = """backend: "onnxruntime"
max_batch_size: 8
dynamic_batching { }
"""


PAUSE = {"pause": 0.02}
TOKENS = (*(each for _ in range(6) for each in (piece("a"), PAUSE)), {"final": True})


class Walk:
    """Inside `with`, the source files that this thread enters and the calls are noted."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.calls: list[str] = []

    def __enter__(self) -> "Walk":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(SOURCES):
            self.files.add(name.removeprefix(f"{ROOT}/"))
            self.calls.append(frame.f_code.co_qualname)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models of all walks."""
    installed(tmp_path / "installed")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    models = tmp_path / "models"
    write_model(models, "tokens", contract(*TOKENS))
    onnx_models.write(models, "add_sub", onnx_models.add_sub(), ADD_SUB)
    write_model(models, "repeat", REPEAT)
    shutil.copytree(ROOT / "model_repository" / "openai_python", models / "openai_python")
    return models


def serving(repository: Path, **options: Any) -> Server:
    """A server on this event loop, so that its code runs in the thread of the test."""
    addresses = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1"}
    ports = {"http_port": 0, "grpc_port": 0}
    return Server(
        model_repository=str(repository), exit_on_error=False, **addresses, **ports, **options
    )


@pytest.fixture
async def server(repository: Path) -> AsyncIterator[Server]:
    async with serving(repository, allow_http=True, allow_grpc=True) as started:
        yield started


@pytest.fixture
async def polling_server(repository: Path) -> AsyncIterator[Server]:
    poll = {"model_control_mode": "poll", "repository_poll_secs": POLL_SECS}
    async with serving(repository, **poll) as started:
        yield started


async def walked(send: Callable[[], object]) -> set[str]:
    """The files that the second of two blocking requests enters."""
    await asyncio.to_thread(send)
    with Walk() as walk:
        await asyncio.to_thread(send)
    return walk.files


async def test_an_infer_in_a_batch_of_onnx_runtime(server: Server) -> None:
    with Connection(server.ports["http"]) as connection:
        files = await walked(lambda: infer(connection))
    assert len(files) <= INFER_FILES, "\n".join(sorted(files))


async def test_the_calls_of_an_infer_in_a_batch_of_onnx_runtime(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The execution is on the loop, as it is where no other process delays it."""
    monkeypatch.setattr("gateway.tensor_runtime.instance.LIMIT_NS", 10**9)
    fewest = await calls_of_infer(server)
    assert len(fewest) <= INFER_CALLS, "\n".join(fewest)


async def test_the_calls_of_an_infer_of_a_tenant_with_limits(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tensor_runtime.instance.LIMIT_NS", 10**9)
    made, file = new_key(), tmp_path / "keys.toml"
    keys.write(file, keys.stored(made), "[tenants.team]", "requests_per_minute = 1e6")
    async with serving(repository, allow_http=True, api_keys=str(file)) as server:
        fewest = await calls_of_infer(server, f"x-api-key: {made[0]}")
    assert len(fewest) <= LIMITED_INFER_CALLS, "\n".join(fewest)


async def calls_of_infer(server: Server, *headers: str) -> list[str]:
    """The fewest calls of an inference."""
    tries = []
    with Connection(server.ports["http"]) as connection:
        for _ in range(WARM_INFERS):
            await asyncio.to_thread(infer, connection, *headers)
        for _ in range(TRIES):
            with Walk() as walk:
                await asyncio.to_thread(infer, connection, *headers)
            tries.append(walk.calls)
    return min(tries, key=len)


def infer(connection: Connection, *headers: str) -> None:
    """An inference with binary inputs and outputs of 16 numbers."""
    values = np.arange(16, dtype=np.float32).tobytes()
    inputs = [
        {
            "name": name,
            "shape": [1, 16],
            "datatype": "FP32",
            "parameters": {"binary_data_size": len(values)},
        }
        for name in ("INPUT0", "INPUT1")
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    length = f"Inference-Header-Content-Length: {len(head)}"
    connection.send(post("/v2/models/add_sub/infer", head + 2 * values, length, *headers))
    assert connection.answer().status == 200


async def test_a_further_token_of_a_chat(server: Server) -> None:
    walks = await tokens_of(server, "/v1/chat/completions", chat("tokens", stream=True))
    check_tokens(walks, CHAT_TOKEN_CALLS)


async def test_a_further_event_of_generate_stream(server: Server) -> None:
    body = {"text_input": "x", "n": 8, "delay_us": 20_000}
    walks = await tokens_of(server, "/v2/models/repeat/generate_stream", body)
    check_tokens(walks, TOKEN_CALLS)


def check_tokens(walks: Sequence[Walk], most_calls: int) -> None:
    fewest = min(walks, key=lambda walk: len(walk.calls))  # a busy machine adds those of waits
    assert len(fewest.files) <= TOKEN_FILES, "\n".join(sorted(fewest.files))
    assert len(fewest.calls) <= most_calls, "\n".join(fewest.calls)


async def tokens_of(server: Server, path: str, body: Any) -> list[Walk]:
    """A walk for each chunk of an answer from the third to the last but one."""
    loop, chunks = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    def send() -> None:
        with Connection(server.ports["http"]) as connection:
            connection.ask(path, body)
            assert connection.head().status == 200
            while chunk := connection.chunk():
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            loop.call_soon_threadsafe(chunks.put_nowait, b"")

    walks: list[Walk] = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(send))
        while True:
            with Walk() as walk:
                chunk = await chunks.get()
            if not chunk:
                break
            walks.append(walk)
    return walks[2:-1]


async def test_a_model_infer_in_a_batch_of_onnx_runtime(server: Server) -> None:
    request = pb.ModelInferRequest(model_name="add_sub")
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="FP32", shape=[1, 16])
        request.raw_input_contents.append(np.arange(16, dtype=np.float32).tobytes())
    with connected(f"127.0.0.1:{server.ports['grpc']}") as stub:
        files = await walked(lambda: stub.ModelInfer(request, timeout=TIMEOUT_SECS))
    assert len(files) <= MODEL_INFER_FILES, "\n".join(sorted(files))


async def test_a_further_response_of_model_stream_infer(server: Server) -> None:
    request = infer_request("repeat", "a", text_input="x", n=8, delay_us=100_000)
    with connected(f"127.0.0.1:{server.ports['grpc']}") as stub, streaming(stub) as rpc:
        await asyncio.to_thread(rpc.ask, request)
        for _ in range(2):
            await asyncio.to_thread(rpc.answer)
        walks = [Walk() for _ in range(2)]
        for walk in walks:
            with walk:
                for _ in range(2):
                    await asyncio.to_thread(rpc.answer)
    fewest = min((walk.files for walk in walks), key=len)  # a busy machine adds those of a wait
    assert len(fewest) <= RESPONSE_FILES, "\n".join(sorted(fewest))


async def test_a_cancelled_model_stream_infer(server: Server) -> None:
    request = infer_request("repeat", "a", text_input="x", n=100, delay_us=500_000)
    with connected(f"127.0.0.1:{server.ports['grpc']}") as stub, streaming(stub) as rpc:
        await asyncio.to_thread(rpc.ask, request)
        await asyncio.to_thread(rpc.answer)
        with Walk() as walk:
            await asyncio.to_thread(rpc.cancel)
            await asyncio.sleep(CANCEL_SECS)
    wait_until(lambda: failures(server) == 1, "the request is cancelled")
    assert len(walk.files) <= CANCEL_FILES, "\n".join(sorted(walk.files))


def failures(server: Server) -> int:
    """Requests of the model that failed or were cancelled."""
    (rows,) = server.model("repeat").statistics()["model_stats"]
    return int(rows["inference_stats"]["fail"]["count"])


async def test_a_poll_that_changes_the_instances_of_a_model(
    polling_server: Server, repository: Path
) -> None:
    files = await polled(polling_server, (repository / "repeat" / "config.pbtxt").touch)
    assert len(files) <= UPDATE_FILES, "\n".join(sorted(files))


async def test_a_poll_that_replaces_a_model(polling_server: Server, repository: Path) -> None:
    files = await polled(polling_server, (repository / "repeat" / "1" / "added").touch)
    assert "gateway/models/warmup.py" in files
    assert len(files) <= REPLACE_FILES, "\n".join(sorted(files))


async def polled(server: Server, change: Callable[[], object]) -> set[str]:
    """The files of gateway/models/ that polls enter until a change of a folder is loaded."""
    while not await server.async_ready():  # noqa: ASYNC110 - a client can only ask
        await asyncio.sleep(POLL_SECS)
    with Walk() as walk:
        change()
        async with asyncio.timeout(LOAD_SECS):
            while "gateway/models/loading.py" not in walk.files:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(POLL_SECS)
        await asyncio.sleep(5 * POLL_SECS)
    return {each for each in walk.files if each.startswith("gateway/models/")}


async def test_a_chat_with_tools(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with Connection(server.ports["http"]) as connection:

        def send() -> None:
            connection.ask("/v1/chat/completions", chat("openai_python", tools=tools))
            assert connection.answer().status == 200

        files = await walked(send)
    assert len(files) <= CHAT_FILES, "\n".join(sorted(files))


def chat(model: str, **more: object) -> Any:
    """A chat request to a model of OpenAI's contract."""
    messages = [{"role": "user", "content": "a b c d e"}]
    return {"model": model, "messages": messages, **more}
