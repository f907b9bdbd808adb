"""A server with more models than it may have in memory, as clients see it on each protocol."""

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from tests.conformance.models import identity
from tests.raw import Connection
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving, held, http_get, serving, wait_until, write_model

pytestmark = [
    pytest.mark.runs_on("frontends"),
    pytest.mark.own_models("models share the memory of their own server"),
]

FLAGS = (
    *("--on-demand", "--max-resident-models=3", "--exit-on-error=false"),
    *("--model-control-mode=explicit", "--load-model=*", "--open-control=true"),
    *("--http-first-response-secs=0.1", "--http-keep-alive-secs=0.1"),
)
WARM = """
model_warmup { name: "first" batch_size: 1
  inputs { key: "INPUT" value { data_type: TYPE_STRING dims: [1] zero_data: true } } }
"""
TEXT = {"INPUT": "hello"}


def slow(**parameters: object) -> str:
    """A model whose load takes as long as its file `held` exists: its warm-up waits for that."""
    return identity("BYTES", "1", hold_file="held", **parameters) + WARM


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name in ("a", "b", "left"):
        write_model(folder, name, slow(keep_alive_secs=0))
    write_model(folder, "broken", identity("BYTES", "1", load_fails="no weights"))
    write_model(folder, "echo", identity("BYTES", "1", residency="always"))
    return folder


@pytest.fixture(scope="module")
def server(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, server_kind: None
) -> Iterator[Serving]:
    store = tmp_path_factory.mktemp("store")
    with serving(repository, *FLAGS, f"--model-store-path={store}") as started:
        yield started


def rows(server: Serving) -> dict[str, Any]:
    """The rows of `sluice ps`, by model."""
    status, body = http_get(server.ports["http"], "/v2/memory")
    assert status == 200
    return {row["name"]: row for row in json.loads(body)["models"]}


def wait_state(server: Serving, model: str, state: str) -> None:
    wait_until(lambda: rows(server)[model]["state"] == state, f"{model} is {state}")


def ask_echo(server: Serving) -> None:
    """The neighbour answers."""
    with Connection(server.ports["http"]) as connection:
        connection.ask("/v2/models/echo/generate", TEXT)
        assert connection.answer().json["OUTPUT"] == "hello"


def test_a_model_asleep_is_ready_in_the_index_and_for_probes(server: Serving) -> None:
    wait_state(server, "b", "asleep")  # another test may have had it awake
    with Connection(server.ports["http"]) as connection:
        connection.ask("/v2/repository/index", {})
        index = {row["name"]: row for row in connection.answer().json}
    assert (index["b"]["state"], index["b"]["reason"]) == ("READY", "asleep")
    assert (index["echo"]["state"], index["echo"].get("reason", "")) == ("READY", "")
    assert http_get(server.ports["http"], "/v2/models/b/ready")[0] == 200
    assert http_get(server.ports["http"], "/v2/health/ready")[0] == 200


def test_a_stream_gets_comments_until_its_model_is_awake(server: Serving, repository: Path) -> None:
    connection = HTTPConnection("127.0.0.1", server.ports["http"], timeout=WAIT_SECS)
    with closing(connection):
        with held(repository, "a"):
            connection.request("POST", "/v2/models/a/generate_stream", json.dumps(TEXT))
            answer = connection.getresponse()
            assert (answer.status, answer.readline()[:1]) == (200, b":")
            ask_echo(server)
            assert rows(server)["a"]["state"] == "waking"
            assert server.metrics()["gateway_waking_requests"] == 1
        assert b'"OUTPUT":"hello"' in answer.read()
    wait_state(server, "a", "asleep")
    page = server.metrics()
    assert page['gateway_model_wakes_total{outcome="success"}'] >= 1
    assert page['gateway_model_evictions_total{why="keep_alive"}'] >= 1


def test_requests_of_one_rpc_wait_for_their_model_and_keep_their_order(
    server: Serving, repository: Path
) -> None:
    ids = [str(number) for number in range(5)]
    with connected(server.grpc) as stub, streaming(stub) as rpc:
        with held(repository, "b"):
            rpc.ask(*(infer_request("b", each, INPUT=each) for each in ids))
            server.wait_metric("gateway_requests_in_flight", "b", 5)
            rpc.ask(infer_request("echo", "behind", INPUT="echo"))
            ask_echo(server)
        answers = [rpc.answer().infer_response.id for _ in (*ids, "behind")]
        assert answers == [*ids, "behind"]


def test_a_client_that_disconnects_while_its_model_loads_leaves_the_load_to_others(
    server: Serving, repository: Path
) -> None:
    with Connection(server.ports["http"]) as second:
        with held(repository, "left"):
            with Connection(server.ports["http"]) as first:
                first.ask("/v2/models/left/generate", TEXT)
                wait_state(server, "left", "waking")
            second.ask("/v2/models/left/generate", TEXT)
            server.wait_metric("gateway_requests_in_flight", "left", 1)
        assert second.answer().json["OUTPUT"] == "hello"
    assert server.text.count("waking model model=left") == 1


def test_a_model_that_cannot_be_loaded_is_refused_with_the_time_of_the_next_try(
    server: Serving,
) -> None:
    with Connection(server.ports["http"]) as connection:
        for _ in range(3):
            connection.ask("/v2/models/broken/generate", TEXT)
            answer = connection.answer()
            assert (answer.status, answer.json["error"]) == (
                503,
                "model 'broken' could not be loaded into memory: no weights",
            )
        connection.ask("/v2/models/broken/generate", TEXT)
        answer = connection.answer()
    assert answer.status == 503
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert "3 times: no weights" in answer.json["error"]
    ask_echo(server)


def test_ps_shows_the_models_and_the_budget(
    server: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["ps", f"--url={server.http}"])
    shown = capsys.readouterr().out
    assert "budget: models: 3" in shown
    assert "always" in shown
    main(["ps", f"--url={server.http}", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["models"]] == ["a", "b", "broken", "echo", "left"]
    assert found["models"][3]["state"] == "awake"
    with pytest.raises(SystemExit):
        main(["ps", f"--url=http://127.0.0.1:{server.ports['metrics']}"])
    assert "does not describe its memory" in capsys.readouterr().err
