"""The port of a replica: connections of strangers, and their end."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.backend import MetricSample
from gateway.config.pbtxt import parse
from gateway.fleet import accepting
from gateway.fleet.answer import RoutedAnswer
from gateway.fleet.offers import load_of_requests
from gateway.fleet.replica import FleetPort
from gateway.fleet.scaling import LEAST_NEED, USED_SECS, need_of
from gateway.observability.statistics import ModelStatistics
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import read_response
from gateway.processes.text_runs import read_run
from gateway.server import Listeners
from gateway.settings import FleetSettings, TlsSettings
from gateway.stream import ResponseStream
from tests.builders import FLAG, TEXT, text_response
from tests.certificates import Authority
from tests.gateway.fleet.fake_replica import until

QUICK = "parameters { key: 'scale_target_wait_ms' value { string_value: '100' } }"


@asynccontextmanager
async def opened(tls: TlsSettings | None = None) -> AsyncIterator[FleetPort]:
    """The open port of a replica whose models never change."""
    changed = asyncio.Event()
    server: Any = SimpleNamespace(dataplane=SimpleNamespace(changed=changed.wait))
    found = FleetPort(server, Listeners(), FleetSettings(port=0, tls=tls))
    await found.bind()
    async with asyncio.TaskGroup() as tasks:
        await found.open(tasks)
        yield found
        found.stop_accepting = lambda *_: None  # type: ignore[method-assign]
        if found._server is not None:  # noqa: SLF001 - no data plane is asked for its offers
            found._server.close()  # noqa: SLF001
        found.stop_waiting(tasks, 0.01)


def connected(port: FleetPort) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port.ports["fleet"]))
    found.setblocking(False)
    return found


async def test_a_connection_without_a_handshake_is_dropped_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKE_SECS", 0.05)
    async with opened() as port:
        with connected(port):
            await until(lambda: "router dropped" in caplog.text)
            await until(lambda: not port.links)


async def test_a_connection_that_begins_no_tls_is_dropped_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKE_SECS", 0.05)
    authority = Authority(tmp_path / "authority")
    own = authority.issue("own")
    pem = TlsSettings(
        wire="fleet",
        cert=str(own.cert),
        key=str(own.key),
        root=str(authority.root),
        mutual=True,
    )
    async with opened(pem) as port:
        with connected(port):
            await until(lambda: "router dropped" in caplog.text)
            await until(lambda: not port.links)


async def test_connections_beyond_the_limit_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "MOST_ROUTERS", 2)
    async with opened() as port, AsyncExitStack() as owner:
        kept = [owner.enter_context(connected(port)) for _ in range(2)]
        await until(lambda: len(port.links) == 2)
        with connected(port) as further:
            ended = asyncio.get_running_loop().sock_recv(further, 1)
            assert await asyncio.wait_for(_end_of(ended), 5) == b""
        assert len(port.links) == len(kept)


async def _end_of(received: Any) -> bytes:
    """The last bytes of a connection; none if it is reset."""
    try:
        found: bytes = await received
    except ConnectionResetError:
        return b""
    return found


async def test_garbage_behind_a_refused_frame_is_not_handled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with opened() as port:
        with connected(port) as stranger:
            await asyncio.get_running_loop().sock_sendall(stranger, bytes(90_000))
            await until(lambda: "router refused" in caplog.text)
            await until(lambda: not port.links)
    refused = [each for each in caplog.records if each.message == "router refused"]
    assert len(refused) == 1


@pytest.mark.parametrize(
    ("final_ends", "end"), [(False, [InferenceKind.END]), (True, [])], ids=["earlier", "this"]
)
async def test_texts_of_a_turn_are_one_frame_and_end_is_for_routers_of_an_earlier_release(
    final_ends: bool, end: list[int]
) -> None:
    sent: list[tuple[int, int, bytes]] = []
    due: list[Callable[[], None]] = []
    channel: Any = SimpleNamespace(
        join=lambda *_: None,
        leave=lambda *_: None,
        send=lambda kind, call, payload=b"": sent.append((kind, call, payload)),
        before_write=due.append,
    )
    stream, ended = ResponseStream(), asyncio.Event()
    bulk: Any = SimpleNamespace(channel=channel)
    answer = RoutedAnswer(bulk, 7, final_ends=final_ends)
    answer.open(ended.set)
    answer.begin(stream, None)
    given = [text_response("a", tokens=1), text_response("b"), FLAG]
    for response in given:
        stream.put(response)
    assert sent == []
    for send in due:
        send()
    kinds = [InferenceKind.TEXTS, InferenceKind.DATA, *end]
    assert [(kind, call) for kind, call, _ in sent] == [(kind, 7) for kind in kinds]
    assert [*read_run(sent[0][2]).responses(), read_response(sent[1][2])] == given
    assert len(due) == 1
    assert ended.is_set()


async def test_the_metrics_of_a_replica_have_the_need_of_each_model() -> None:
    async with opened() as port:
        busy = SimpleNamespace(
            name="busy",
            version="2",
            config=parse(QUICK, "busy/config.pbtxt"),
            instances=[SimpleNamespace(concurrency=1), SimpleNamespace(concurrency=1)],
            requests=range(10),
            most_in_flight=100,
            fair=None,
            statistics=ModelStatistics(),
        )
        dataplane: Any = port._dataplane  # noqa: SLF001 - it is the one of `opened`
        dataplane.models = lambda: [busy]
        (found,) = [each for each in port.families() if each.name == "gateway_fleet_need"]
    # Eight requests wait for two executions of 50 ms at a time: 200 ms are twice the target.
    assert found.samples == [
        MetricSample("gateway_fleet_need", {"model": "busy", "version": "2"}, pytest.approx(2.0))
    ]


@pytest.mark.parametrize(
    ("parameters", "requests", "idle_secs", "expected"),
    [
        ({"replicas": "0..1"}, 0, 0, LEAST_NEED),
        ({"replicas": "0..1"}, 0, USED_SECS, 0),
        ({"replicas": "0..1"}, 1, USED_SECS, LEAST_NEED),
        ({"replicas": "0..1", "scale_to_zero_secs": "9"}, 0, 10, 0),
        ({"replicas": "1..2"}, 0, 0, 0),
    ],
    ids=["after a request", "after a minute", "in flight", "short time to zero", "from one"],
)
def test_a_model_that_may_have_no_replica_is_in_use_for_a_while_after_a_request(
    parameters: dict[str, str], requests: int, idle_secs: float, expected: float
) -> None:
    model: Any = SimpleNamespace(
        config=replace(TEXT, parameters=parameters),
        instances=[SimpleNamespace(concurrency=1)],
        requests=range(requests),
    )
    load = load_of_requests(queued=0, step_secs=0.1, room=9)
    assert need_of(model, load, idle_secs) == expected
