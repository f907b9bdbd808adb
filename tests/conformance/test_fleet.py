"""`sluice replica` and `--fleet static:...`: requests of a router for models that others host."""

import random
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.chatting import CHATTING
from tests.conformance.clients import WIRES, connect
from tests.conformance.models import DECOUPLED, EVERY_VERSION, REPEAT, identity, with_parameters
from tests.conformance.turns import messages
from tests.leaving import IN_FLIGHT
from tests.raw import Connection
from tests.rpc import connected, infer_request
from tests.serving import (
    WAIT_SECS,
    Serving,
    replica,
    serving,
    static_fleet,
    wait_until,
    write_model,
)

STREAM = "/v2/models/repeat/generate_stream"
CLIENTS, RANDOM_SECS = 12, 2.0
ENDLESS = {"text_input": "x", "n": 100_000, "delay_us": 20_000}
BATCHED = "max_batch_size: 4\ndynamic_batching { max_queue_delay_microseconds: 1000 }\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet") / "models"
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "echo", identity("FP32") + EVERY_VERSION, versions=(1, 3))
    write_model(folder, "text", identity("BYTES"))
    write_model(folder, "batched", identity("INT32", "2") + BATCHED)
    write_model(folder, "slow", identity("BYTES", "1", delay_us=2_000_000))
    write_model(folder, "chatting", CHATTING + DECOUPLED)
    write_model(folder, "failing", identity("BYTES", "1", fail="the model says no"))
    return folder


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository without models."""
    return tmp_path_factory.mktemp("nothing")


@pytest.fixture(scope="module")
def replicas(models: Path, environment: dict[str, str]) -> Iterator[tuple[Serving, Serving]]:
    with (
        replica(models, "*", environment=environment) as first,
        replica(models, "*", environment=environment) as second,
    ):
        yield first, second
    for each in (first, second):
        assert each.process.returncode == 0, each.log[-50:]
        assert "Traceback" not in each.text


@pytest.fixture(scope="module")
def router(nothing: Path, replicas: tuple[Serving, Serving]) -> Iterator[Serving]:
    with serving(nothing, static_fleet(*replicas)) as started:
        yield started
    assert started.process.returncode == 0, started.log[-50:]
    assert "Traceback" not in started.text


@pytest.fixture
def http(router: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.http, timeout=WAIT_SECS) as found:
        yield found


def numbers(*values: float) -> dict[str, object]:
    """The body of a request to `echo`."""
    data = {"name": "INPUT", "datatype": "FP32", "shape": [len(values)], "data": list(values)}
    return {"id": "7", "inputs": [data]}


@pytest.mark.parametrize("wire", WIRES)
async def test_a_router_shows_the_models_of_its_replicas(router: Serving, wire: str) -> None:
    async with connect(router, wire) as client:
        assert list((await client.metadata("echo")).versions) == ["1", "3"]
        assert (await client.config("batched")).max_batch_size == 4


def test_a_router_answers_grpc_for_a_model_of_a_replica(router: Serving) -> None:
    with connected(router.grpc) as stub:
        answer = stub.ModelInfer(infer_request("text", "7", INPUT="ä"))
    assert (answer.id, answer.model_version) == ("7", "1")
    assert answer.raw_output_contents[0] == b"\x02\0\0\0" + "ä".encode()


def test_metadata_and_configuration_are_those_of_the_replica(http: httpx.Client) -> None:
    metadata = http.get("/v2/models/echo").json()
    assert metadata["versions"] == ["1", "3"]
    assert metadata["inputs"] == [{"name": "INPUT", "datatype": "FP32", "shape": [-1]}]
    config = http.get("/v2/models/batched/config").json()
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 1000
    assert http.get("/v2/models/echo/versions/3/ready").status_code == 200
    assert http.get("/v2/health/ready").status_code == 200
    rows = http.post("/v2/repository/index").json()
    assert {(row["name"], row["version"], row["state"]) for row in rows} >= {
        ("echo", "1", "READY"),
        ("echo", "3", "READY"),
    }


def test_each_version_is_asked_for_itself(http: httpx.Client) -> None:
    for version in ("1", "3"):
        answer = http.post(f"/v2/models/echo/versions/{version}/infer", json=numbers(1)).json()
        assert (answer["model_version"], answer["id"]) == (version, "7")
        assert answer["outputs"][0]["data"] == [1]
    assert http.post("/v2/models/echo/infer", json=numbers(1)).json()["model_version"] == "3"


def test_the_error_of_a_model_is_that_of_the_replica(http: httpx.Client) -> None:
    text = {"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    answer = http.post("/v2/models/failing/infer", json={"inputs": [text]})
    assert answer.status_code == 500
    assert "the model says no" in answer.json()["error"]


def test_an_invalid_request_is_refused_by_the_router(http: httpx.Client) -> None:
    answer = http.post("/v2/models/batched/infer", json=numbers(1))
    assert answer.status_code == 400
    assert "INPUT" in answer.json()["error"]


def test_a_request_that_a_replica_refuses_is_refused_with_a_json_error(http: httpx.Client) -> None:
    turn = {"messages": messages("hello"), "sequence_id": "never begun"}
    answer = http.post("/v2/models/chatting/generate_stream", json=turn)
    assert answer.status_code == 400
    assert "is not open" in answer.json()["error"]


def test_a_stream_arrives_as_a_whole(http: httpx.Client) -> None:
    body = {"text_input": "x", "n": 500, "delay_us": 0}
    with http.stream("POST", STREAM, json=body) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data:")]
    assert len(events) == 500


def test_a_disconnect_reaches_the_replica(
    router: Serving, replicas: tuple[Serving, Serving]
) -> None:
    def in_flight() -> list[float]:
        return [each.metric(IN_FLIGHT, "repeat") for each in replicas]

    before = in_flight()
    with Connection(router.ports["http"]) as client:
        client.ask(STREAM, ENDLESS)
        client.head()
        wait_until(lambda: sum(in_flight()) == sum(before) + 1, "the replica works")
    wait_until(lambda: in_flight() == before, "the replica has stopped")
    assert router.metric(IN_FLIGHT, "repeat") == 0


def test_a_slow_reader_holds_back_its_replica(
    router: Serving, replicas: tuple[Serving, Serving]
) -> None:
    before = {each: each.resident_bytes for each in (router, *replicas)}
    with Connection(router.ports["http"], receive_buffer=4096) as client:
        client.ask(STREAM, {"text_input": "x" * 4096, "n": 100_000, "delay_us": 0})
        client.head()
        time.sleep(1)
        assert max(each.resident_bytes - size for each, size in before.items()) < 64 << 20
        assert sum(each.metric(IN_FLIGHT, "repeat") for each in replicas) == 1
    for each in replicas:
        each.wait_metric(IN_FLIGHT, "repeat", 0)  # the next test counts requests in flight


def test_random_clients_leave_nothing_at_a_router_and_its_replicas(
    router: Serving, replicas: tuple[Serving, Serving]
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    every = (router, *replicas)
    files = [each.open_files for each in every]
    with ThreadPoolExecutor(CLIENTS) as clients:
        ends_at = time.monotonic() + RANDOM_SECS
        storms = [
            clients.submit(_storm, router, random.Random(seed + number), ends_at)
            for number in range(CLIENTS)
        ]
    answered = sum(each.result() for each in storms)
    assert answered > CLIENTS, f"seed {seed}"
    for server in every:
        for model in ("repeat", "text"):
            server.wait_metric(IN_FLIGHT, model, 0)
    wait_until(lambda: [each.open_files for each in every] <= files, f"no socket, seed {seed}")


def _storm(router: Serving, chance: random.Random, ends_at: float) -> int:
    """One client after the other, each of which leaves somehow; the number of whole answers."""
    answered = 0
    while time.monotonic() < ends_at:
        with Connection(router.ports["http"]) as client:
            size = chance.choice((1, 100, 5000))
            body = {"text_input": "x" * size, "n": chance.randrange(1, 300)}
            client.ask(STREAM, body | {"delay_us": chance.choice((0, 1000))})
            match chance.randrange(4):
                case 0:
                    client.reset()
                case 1:
                    client.head()
                case 2:
                    client.head()
                    client.chunk()
                case _:
                    assert client.answer().status == 200
                    answered += 1
    return answered


def test_requests_beyond_every_limit_are_refused(nothing: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    write_model(folder, "repeat", REPEAT + with_parameters({"max_in_flight": 1}))
    with (
        replica(folder, "*") as first,
        replica(folder, "*") as second,
        serving(nothing, static_fleet(first, second)) as server,
        ExitStack() as clients,
    ):
        for _ in range(2):
            client = clients.enter_context(Connection(server.ports["http"]))
            client.ask(STREAM, ENDLESS)
            assert client.head().status == 200
        answer = httpx.post(f"{server.http}{STREAM}", json=ENDLESS, timeout=WAIT_SECS)
        assert answer.status_code == 503
        assert "has 1 requests in flight, the most it accepts" in answer.text


class TestLosses:
    """Replicas of their own, which end."""

    @pytest.fixture
    def pair(self, models: Path, environment: dict[str, str]) -> Iterator[list[Serving]]:
        with (
            replica(models, "*", environment=environment) as first,
            replica(models, "*", environment=environment) as second,
        ):
            yield [first, second]

    @pytest.fixture
    def server(self, nothing: Path, pair: list[Serving]) -> Iterator[Serving]:
        with serving(nothing, static_fleet(*pair)) as started:
            yield started
        assert "Traceback" not in started.text

    def test_a_killed_replica_ends_its_streams_and_no_others(
        self, server: Serving, pair: list[Serving]
    ) -> None:
        with ExitStack() as clients:
            streams = []
            for _ in range(4):
                client = clients.enter_context(Connection(server.ports["http"]))
                client.ask(STREAM, ENDLESS)
                client.head()
                streams.append(client)
            wait_until(
                lambda: [each.metric(IN_FLIGHT, "repeat") for each in pair] == [2, 2], "spread"
            )
            pair[0].process.kill()
            wait_until(lambda: server.metric(IN_FLIGHT, "repeat") == 2, "two have ended")
            server.wait_logged("replica lost")
            with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as http:
                for _ in range(4):
                    assert http.post("/v2/models/echo/infer", json=numbers(1)).status_code == 200
            time.sleep(0.2)
            assert server.metric(IN_FLIGHT, "repeat") == 2

    def test_a_draining_replica_answers_its_last_request_as_a_whole(
        self, server: Serving, pair: list[Serving]
    ) -> None:
        pair[1].stop()
        text = {"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["x" * 5_000_000]}
        with ThreadPoolExecutor(1) as clients:
            url = f"{server.http}/v2/models/slow/infer"
            asked = clients.submit(httpx.post, url, json={"inputs": [text]}, timeout=WAIT_SECS)
            pair[0].wait_metric(IN_FLIGHT, "slow", 1)
            assert pair[0].stop() == 0
            answer = asked.result()
        assert answer.status_code == 200
        assert answer.json()["outputs"][0]["data"] == text["data"]

    def test_a_replica_with_a_broken_model_serves_the_others(
        self, models: Path, nothing: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "models"
        shutil.copytree(models, folder)
        write_model(folder, "broken", identity("FP32", load_fails="no such weights"))
        with (
            replica(folder, "*", "--exit-on-error=false") as host,
            serving(nothing, static_fleet(host)) as server,
            httpx.Client(base_url=server.http, timeout=WAIT_SECS) as http,
        ):
            assert http.post("/v2/models/echo/infer", json=numbers(1)).status_code == 200
            assert http.get("/v2/models/broken/ready").status_code == 404
            unload = http.post("/v2/repository/models/echo/unload")
            assert unload.status_code == 503

    def test_without_replicas_a_model_is_not_ready_and_says_so(
        self, server: Serving, pair: list[Serving]
    ) -> None:
        for each in pair:
            each.process.send_signal(signal.SIGKILL)
        with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as http:
            wait_until(
                lambda: http.get("/v2/models/echo/ready").status_code != 200, "it is not ready"
            )
            answer = http.post("/v2/models/echo/infer", json=numbers(1))
            assert answer.status_code == 503
            assert "has no replica that takes requests" in answer.json()["error"]
            for path in ("/v2/health/live", "/v2/health/ready"):
                assert http.get(path).status_code == 200

    def test_a_draining_replica_completes_its_streams(
        self, server: Serving, pair: list[Serving]
    ) -> None:
        with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as http:
            body = {"text_input": "x", "n": 50, "delay_us": 20_000}
            with http.stream("POST", STREAM, json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                for each in pair:
                    each.begin_stop()
                events = [line for line in lines if line.startswith("data:")]
            assert len(events) == 49
            assert not any("error" in line for line in events)
            assert [each.wait_ended() for each in pair] == [0, 0]


def test_a_port_in_use_ends_the_start_of_a_replica_with_a_line(
    models: Path, replicas: tuple[Serving, Serving]
) -> None:
    taken = f"--fleet-port={replicas[0].ports['fleet']}"
    server = Serving(models, (taken,), command=("replica", "echo"))
    assert server.wait_ended() == 1
    assert "for fleet: " in server.text
    assert "Traceback" not in server.text
