"""Inferences whose request arrives as a whole: they need no task."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from backends.identity import ExecutionGate
from gateway.dataplane import DataPlane
from gateway.errors import Code
from gateway.frontends.http.guard import HttpAccess
from gateway.frontends.http.infer import InferRoute
from gateway.frontends.http.listener import DEFAULT_LIMITS, HttpListener, listening_at
from gateway.frontends.http.request_scope import WATCH, TracedApp
from gateway.messages import InferResponse
from gateway.observability.traceparent import ParentSpan
from gateway.observability.tracer import Tracer
from gateway.policy.credentials import Credentials
from gateway.settings import HttpTimeLimits
from gateway.threads import LARGE_BYTES
from tests.builders import (
    DECOUPLED,
    Execution,
    KeptTraces,
    LoadedModels,
    ScriptedInstance,
    settle,
    soon,
    uncollected,
)
from tests.conftest import Serve
from tests.gateway.fleet.fake_replica import until
from tests.gateway.frontends.http.connections import Connection
from tests.gateway.frontends.http.test_infer import (
    ANSWER,
    ASK,
    BODY,
    ECHO,
    FLOATS,
    PATH,
    SETTINGS,
    echo,
    elsewhere,
)
from tests.raw import post

BINARY = {"name": "X", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}
BINARY_JSON = json.dumps({"inputs": [BINARY], "parameters": {"binary_data_output": True}}).encode()
LENGTH = "Inference-Header-Content-Length"
REQUESTS = {
    "json": post(PATH, BODY),
    "a version": post("/v2/models/echo/versions/1/infer", BODY),
    "binary": post(PATH, BINARY_JSON + FLOATS, f"{LENGTH}: {len(BINARY_JSON)}"),
    "raw": post(PATH, FLOATS, f"{LENGTH}: 0"),
    "compressed": post(PATH, BODY, "Accept-Encoding: gzip"),
    "identity": post(PATH, BODY, "Accept-Encoding: identity"),
    "no model": post("/v2/models/none/infer", BODY),
    "no version": post("/v2/models/echo/versions/one/infer", BODY),
    "a decoupled model": post("/v2/models/llm/infer", BODY),
    "no JSON": post(PATH, b"{"),
    "too large": post(PATH, BODY + b" " * 1000),
    "a wrong length": post(PATH, BODY, f"{LENGTH}: 1000"),
    "no input": post(PATH, b'{"inputs":[]}'),
    "another route": post("/v2/models/echo/generate", b"{}"),
}
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HALVES = [
    (REQUESTS["json"][:-1], REQUESTS["json"][-1:], 0),
    (post(PATH, BODY)[: -len(BODY)], BODY, 0),
    (post(PATH, b"")[:-2].replace(b"Content-Length: 0\r\n", CHUNKED), b"0\r\n\r\n", 1),
]
"""Requests in two pieces, and the number of tasks between them."""
PAUSE_SECS = 0.01


@dataclass(slots=True)
class Served:
    """A listener, and connections to it."""

    listener: HttpListener
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.port)
        self._writers.append(writer)
        return reader, writer

    @property
    def connections(self) -> int:
        return len(self.listener._server.server_state.connections)  # noqa: SLF001 - the same

    @property
    def tasks(self) -> int:
        """The number of requests that have a task."""
        return len(self.listener._server.server_state.tasks)  # noqa: SLF001 - uvicorn counts them

    def close(self) -> None:
        for each in self._writers:
            each.close()
        self.listener.stop(0)


def app_of(
    *models: Any, credentials: Credentials | None = None, tracer: Tracer | None = None
) -> TracedApp:
    dataplane = DataPlane(LoadedModels(*models), tracer=tracer)  # type: ignore[arg-type]
    access = HttpAccess(credentials=credentials)
    return TracedApp(InferRoute(dataplane, SETTINGS, elsewhere, access=access), dataplane.tracer)


@asynccontextmanager
async def served(
    *models: Any, limits: HttpTimeLimits = DEFAULT_LIMITS, credentials: Credentials | None = None
) -> AsyncIterator[Served]:
    async with served_app(app_of(*models, credentials=credentials), limits) as found:
        yield found


@asynccontextmanager
async def served_app(
    app: TracedApp, limits: HttpTimeLimits = DEFAULT_LIMITS
) -> AsyncIterator[Served]:
    listener = HttpListener(app, listening_at("127.0.0.1", 0), limits=limits)
    serving = asyncio.create_task(listener.serve())
    found = Served(listener)
    try:
        await settle()
        yield found
    finally:
        found.close()
        await soon(serving)


def give_back(execution: Execution) -> None:
    """Answer with the inputs of the request."""
    execution.answer(InferResponse(outputs=execution.requests[0].inputs, final=True))
    execution.end()


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    head = await soon(reader.readuntil(b"\r\n\r\n"))
    lines = head.lower().split(b"\r\n")
    length = [int(line[16:]) for line in lines if line.startswith(b"content-length: ")]
    if not length:
        return head + await soon(reader.readuntil(b"0\r\n\r\n"))
    return head + await soon(reader.readexactly(*length))


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_request_in_one_piece_has_the_same_answer_as_in_two(
    serve: Serve, name: str
) -> None:
    llm = replace(ECHO, name="llm", model_transaction_policy=DECOUPLED)
    request = REQUESTS[name]
    body = request.index(b"\r\n\r\n") + 4
    async with served(serve(echo(), config=ECHO), serve(echo(), config=llm)) as server:
        reader, writer = await server.connect()
        writer.write(request)
        whole = await answer_of(reader)
        reader, writer = await server.connect()
        writer.write(request[:body])
        await asyncio.sleep(PAUSE_SECS)
        writer.write(request[body:])
        assert await answer_of(reader) == whole


async def test_no_task_waits_for_the_response(serve: Serve) -> None:
    gate = ExecutionGate()
    async with served(serve(echo(gate=gate), config=ECHO)) as server:
        reader, writer = await server.connect()
        writer.write(REQUESTS["json"])
        await soon(gate.reached(1))
        assert server.tasks == 0
        gate.open()
        assert (await answer_of(reader)).endswith(ANSWER.encode())
        for head, body, tasks in HALVES:
            writer.write(head)
            await asyncio.sleep(PAUSE_SECS)
            assert server.tasks == tasks
            writer.write(body)
            await answer_of(reader)


async def test_a_long_body_is_refused_before_it_has_arrived(serve: Serve) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        writer.write(post(PATH, b" " * HIGH_WATER_LIMIT)[:-1])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 5 * PAUSE_SECS)
        writer.write(b" ")
        assert (await answer_of(reader)).startswith(b"HTTP/1.1 400 ")
        reader, writer = await server.connect()
        writer.write(post(PATH, b" " * (HIGH_WATER_LIMIT + 1))[:-1])
        assert (await answer_of(reader)).startswith(b"HTTP/1.1 400 ")


async def test_answered_requests_are_freed_without_garbage_collection(serve: Serve) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        with uncollected():
            before = requests_in_memory()
            for name in ("json", "compressed", "json", "binary"):
                writer.write(REQUESTS[name])
                await answer_of(reader)
            await settle()
            assert requests_in_memory() == before + 1  # the latest of the connection


def requests_in_memory() -> int:
    return sum(type(each) is RequestResponseCycle for each in gc.get_objects())


async def test_pipelined_requests_are_answered_in_their_order(serve: Serve) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        asked = [post(PATH, json.dumps({"id": f"{each}", **ASK}).encode()) for each in range(5)]
        writer.write(b"".join(asked))
        found = [await answer_of(reader) for _ in asked]
    assert [json.loads(each.partition(b"\r\n\r\n")[2])["id"] for each in found] == list("01234")


async def test_a_client_may_ask_before_it_sends_the_body(serve: Serve) -> None:
    request = post(PATH, BODY, "Expect: 100-continue")
    body = request.index(b"\r\n\r\n") + 4
    async with served(serve(echo(), config=ECHO)) as server:
        reader, writer = await server.connect()
        writer.write(request[:body])
        assert (await soon(reader.readuntil(b"\r\n\r\n"))).startswith(b"HTTP/1.1 100 ")
        writer.write(request[body:])
        assert (await answer_of(reader)).endswith(ANSWER.encode())


async def test_the_model_stops_when_the_client_disconnects(serve: Serve) -> None:
    instance = ScriptedInstance()
    async with served(serve(instance, config=ECHO)) as server:
        _, writer = await server.connect()
        writer.write(REQUESTS["json"])
        execution = await instance.begun()
        writer.close()
        await soon(execution.stopped.wait())


# Parts of its way that need a task all the same.


class Begun:
    """A request that the route has begun, and the application that it has started."""

    def __init__(self, app: TracedApp, body: bytes = BODY, *headers: tuple[bytes, bytes]) -> None:
        self.connection = Connection()
        self.apps: list[ASGIApp] = []
        state = {WATCH: lambda _: None}
        self.cycle = self.connection.cycle(path=PATH, type="http", headers=headers, state=state)
        self.cycle.body += body
        self.cycle.more_body = False
        self.is_begun = app.begin(self.cycle, self.apps.append)

    async def run(self) -> bytes:
        """Run the started application; the response."""
        [app] = self.apps
        await soon(self.cycle.run_asgi(app))  # type: ignore[arg-type] # uvicorn has its own types
        return self.connection.written


@pytest.mark.parametrize(
    "header",
    [b"accept-encoding", b"content-encoding", b"transfer-encoding", b"idempotency-key", b"origin"],
)
async def test_what_has_to_wait_is_not_begun(serve: Serve, header: bytes) -> None:
    app = app_of(serve(echo(), config=ECHO))
    assert not Begun(app, BODY, (header, b"gzip")).is_begun


@pytest.mark.parametrize("accepts", [b"identity", b"br", b"identity, gzip;q=0.5"])
async def test_an_answer_that_stays_without_an_encoding_is_begun(
    serve: Serve, accepts: bytes
) -> None:
    begun = Begun(app_of(serve(echo(), config=ECHO)), BODY, (b"accept-encoding", accepts))
    assert begun.is_begun
    await settle()
    assert begun.connection.answered


async def test_an_idle_connection_keeps_no_body(serve: Serve) -> None:
    begun = Begun(app_of(serve(echo(), config=ECHO)))
    assert begun.is_begun
    assert not begun.cycle.body
    await settle()
    assert begun.connection.answered


async def test_a_large_request_is_not_begun(serve: Serve) -> None:
    app = app_of(serve(echo(), config=ECHO))
    assert Begun(app, b" " * LARGE_BYTES).is_begun
    assert not Begun(app, b" " * (LARGE_BYTES + 1)).is_begun


async def test_the_trace_of_a_begun_request_ends_with_its_response(serve: Serve) -> None:
    traces = KeptTraces()
    instance = ScriptedInstance()
    begun = Begun(app_of(serve(instance, config=ECHO), tracer=traces.tracer(rate=1)))
    execution = await instance.begun()
    assert traces.kept == []
    give_back(execution)
    await settle()
    assert begun.connection.answered
    (names,) = traces.names
    assert names[:2] == ["HTTP_RECV_START", "HTTP_RECV_END"]
    assert names[-3:] == ["REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"]


async def test_of_begun_requests_at_rate_0_only_those_of_traced_callers_are_traced(
    serve: Serve,
) -> None:
    traces = KeptTraces()
    app = app_of(serve(echo(), config=ECHO), tracer=traces.tracer(rate=0))
    parent = ParentSpan(1, 2)
    requests = Begun(app), Begun(app, BODY, (b"traceparent", parent.text.encode()))
    await settle()
    assert all(each.connection.answered for each in requests)
    (trace,) = traces.kept
    assert trace.spans is not None
    assert trace.spans.parent == parent


async def test_the_trace_of_a_begun_request_ends_when_its_client_disconnects(serve: Serve) -> None:
    traces = KeptTraces()
    gate = ExecutionGate()
    app = app_of(serve(echo(gate=gate), config=ECHO), tracer=traces.tracer(rate=1))
    async with served_app(app) as server:
        _, writer = await server.connect()
        writer.write(REQUESTS["json"])
        await soon(gate.reached(1))
        writer.close()
        await until(lambda: bool(traces.kept))
        gate.open()
    (trace,) = traces.kept
    assert trace.error is not None
    assert trace.error.code is Code.CANCELLED


async def test_a_client_that_reads_nothing_is_waited_for(serve: Serve) -> None:
    instance = ScriptedInstance()
    begun = Begun(app_of(serve(instance, config=ECHO)))
    execution = await instance.begun()
    begun.connection.flow.pause_writing()
    give_back(execution)
    await settle()
    running = asyncio.create_task(begun.run())
    await settle()
    assert begun.connection.writes == []
    begun.connection.flow.resume_writing()
    assert (await soon(running)).startswith(b"HTTP/1.1 200 ")


async def test_a_defect_is_answered_and_logged(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(InferRoute, "encode", lambda *_: 1 / 0)
    instance = ScriptedInstance()
    begun = Begun(app_of(serve(instance, config=ECHO)))
    execution = await instance.begun()
    give_back(execution)
    await settle()
    answer = await begun.run()
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"ZeroDivisionError" not in answer
    assert "ZeroDivisionError" in caplog.text
