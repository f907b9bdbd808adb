"""The response cache over a running server: what is a hit, and what statistics and metrics tell.

Counts, and which gauges there are, were checked once against Triton 2.51 with a python model and
its local cache.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.conformance.clients import Client, connect
from tests.conformance.models import identity
from tests.redis_server import HOST, Relay, redis_server, relay
from tests.serving import Serving, series, serving, write_model

CACHED = "response_cache { enable: true }\n"
BATCHED = "max_batch_size: 8\ndynamic_batching { }\n"
SIZE = 1 << 20
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
METRICS = ("--metrics-config=summary_latencies=true",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with answers worth keeping, and some without."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("http", "grpc", "http.aio", "grpc.aio"):
        write_model(folder, f"kept.{name}", identity("FP32", "-1") + CACHED)
    write_model(folder, "batched", identity("FP32", "-1") + CACHED + BATCHED)
    write_model(folder, "texts", identity("BYTES", "1") + CACHED)
    write_model(folder, "plain", identity("FP32", "-1"))
    write_model(folder, "large", identity("FP32", "-1") + CACHED)
    write_model(folder, "classes", identity("FP32", "3") + CACHED)
    write_model(folder, "failing", identity("BYTES", "1", fail="no") + CACHED)
    write_model(folder, "reloaded", identity("FP32", "-1") + CACHED)
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Serving]:
    """A server with a local cache."""
    flags = (f"--cache-config=local,size={SIZE}", *EXPLICIT, *METRICS)
    with serving(models, *flags) as started:
        yield started


def post(http: httpx.Client, model: str, data: list[Any], **more: Any) -> Any:
    kind = "BYTES" if isinstance(data[0], str) else "FP32"
    tensor = {"name": "INPUT", "datatype": kind, "shape": [len(data)], "data": data}
    if "shape" in more:
        tensor["shape"] = more.pop("shape")
    return http.post(f"/v2/models/{model}/infer", json={"inputs": [tensor], **more})


def counts(http: httpx.Client, model: str) -> dict[str, int]:
    """Successes, hits, misses and inferences of a model."""
    [row] = http.get(f"/v2/models/{model}/stats").json()["model_stats"]
    found = {name: each["count"] for name, each in row["inference_stats"].items()}
    wanted = ("success", "queue", "compute_infer", "cache_hit", "cache_miss")
    return {name: found[name] for name in wanted}


def settled_counts(http: httpx.Client, model: str) -> dict[str, int]:
    """The same, once each request is counted as a hit or a miss.

    A miss includes what keeping the answer took, which ends after the client has its own.
    """
    deadline = time.monotonic() + 10
    while True:
        found = counts(http, model)
        if found["cache_hit"] + found["cache_miss"] == found["success"]:
            return found
        assert time.monotonic() < deadline, found


def misses_then_hits(successes: int, hits: int, *, kept: int | None = None) -> dict[str, int]:
    misses = successes - hits
    return {
        "success": successes,
        "queue": successes,
        "compute_infer": misses,
        "cache_hit": hits,
        "cache_miss": misses if kept is None else kept,
    }


async def test_every_client_gets_the_answer_that_was_kept(
    client: Client, http: httpx.Client
) -> None:
    module: Any = tritonclient.http if client.over_http else tritonclient.grpc
    tensor = module.InferInput("INPUT", [3], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2, 3], np.float32))
    model = f"kept.{client.wire}"
    for number in range(3):
        found = await client.call("infer", model, [tensor], request_id=str(number))
        assert found.as_numpy("OUTPUT").tolist() == [1, 2, 3]
    assert counts(http, model) == misses_then_hits(3, 2)


async def test_wires_share_their_answers(server: Serving, http: httpx.Client) -> None:
    assert post(http, "batched", [1, 2], shape=[1, 2]).status_code == 200
    before = counts(http, "batched")["cache_hit"]
    async with connect(server, "grpc") as client:
        tensor = tritonclient.grpc.InferInput("INPUT", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
        found = await client.call("infer", "batched", [tensor])
    assert found.as_numpy("OUTPUT").tolist() == [[1, 2]]
    assert counts(http, "batched")["cache_hit"] == before + 1


def test_the_same_bytes_in_another_shape_are_another_request(http: httpx.Client) -> None:
    flat, tall = [5, 6], {"shape": [2, 1]}
    for more in ({"shape": [1, 2]}, tall, tall):
        [output] = post(http, "batched", flat, **more).json()["outputs"]
        assert output["shape"] == more["shape"]


def test_texts_are_kept(http: httpx.Client) -> None:
    for _ in range(2):
        [output] = post(http, "texts", ["grüße"]).json()["outputs"]
        assert output["data"] == ["grüße"]
    assert counts(http, "texts") == misses_then_hits(2, 1)


def test_parameters_of_the_client_make_another_request(http: httpx.Client) -> None:
    before = counts(http, "batched")["cache_hit"]
    for parameters in ({"a": 1}, {"a": 2}, {"a": 1}):
        post(http, "batched", [7], shape=[1, 1], parameters=parameters)
    assert counts(http, "batched")["cache_hit"] == before + 1


def test_a_model_that_does_not_ask_for_it_has_no_cache(http: httpx.Client) -> None:
    for _ in range(2):
        post(http, "plain", [1])
    assert counts(http, "plain") == misses_then_hits(2, 0, kept=0)


def test_classes_are_made_of_what_the_model_answered(http: httpx.Client) -> None:
    top = [{"name": "OUTPUT", "parameters": {"classification": 1}}]
    every = [{"name": "OUTPUT", "parameters": {"classification": 3}}]
    found = [
        post(http, "classes", [1, 9, 5], outputs=outputs).json()["outputs"][0]["data"]
        for outputs in (top, every, [{"name": "OUTPUT"}])
    ]
    assert found == [
        ["9.000000:1"],
        ["9.000000:1", "5.000000:2", "1.000000:0"],
        [1, 9, 5],
    ]
    assert counts(http, "classes") == misses_then_hits(3, 2)


def test_an_answer_that_is_too_large_is_sent_but_not_kept(
    http: httpx.Client, server: Serving
) -> None:
    for _ in range(2):
        tensor = {"name": "INPUT", "datatype": "FP32", "shape": [SIZE], "data": [1] * SIZE}
        found = http.post("/v2/models/large/infer", json={"inputs": [tensor]})
        assert len(found.json()["outputs"][0]["data"]) == SIZE
    assert counts(http, "large") == misses_then_hits(2, 0)
    assert server.text.count("Failed to insert key [") == 1


def test_errors_are_not_kept(http: httpx.Client) -> None:
    for _ in range(2):
        assert post(http, "failing", ["x"]).json() == {"error": "no"}
    assert counts(http, "failing")["cache_hit"] == 0


@pytest.mark.own_models("loads and unloads")
def test_a_reloaded_model_does_not_answer_with_what_the_old_one_said(http: httpx.Client) -> None:
    changed = {
        "backend": "identity",
        "input": [{"name": "INPUT", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUTPUT", "data_type": "TYPE_FP32", "dims": [-1]}],
        "response_cache": {"enable": True},
        "parameters": {"fail": {"string_value": "changed"}},
    }
    assert post(http, "reloaded", [1]).status_code == 200
    assert post(http, "reloaded", [1]).status_code == 200
    assert counts(http, "reloaded")["cache_hit"] == 1
    load = {"parameters": {"config": httpx.Response(200, json=changed).text}}
    assert http.post("/v2/repository/models/reloaded/load", json=load).status_code == 200
    assert post(http, "reloaded", [1]).json() == {"error": "changed"}


def test_the_metrics_show_the_cache(server: Serving, http: httpx.Client) -> None:
    for _ in range(3):
        assert post(http, "batched", [42], shape=[1, 1]).status_code == 200
    page = server.metrics()
    found = counts(http, "batched")
    for name, count in (("hits", found["cache_hit"]), ("misses", found["cache_miss"])):
        assert page[series(f"nv_cache_num_{name}_per_model", "batched")] == count
    assert page[series("nv_cache_hit_duration_per_model", "batched")] > 0
    assert page[series("nv_cache_hit_summary_per_model_count", "batched")] == found["cache_hit"]
    assert series("nv_cache_num_hits_per_model", "plain") not in page
    assert page["nv_cache_num_lookups"] == page["nv_cache_num_hits"] + page["nv_cache_num_misses"]
    assert page["nv_cache_num_entries"] > 0
    assert 0 < page["nv_cache_util"] < 1


def test_without_a_cache_every_request_executes(models: Path) -> None:
    with serving(models) as server, httpx.Client(base_url=server.http) as http:
        for _ in range(2):
            assert post(http, "texts", ["x"]).status_code == 200
        assert counts(http, "texts") == misses_then_hits(2, 0, kept=0)
        assert [name for name in server.metrics() if "cache" in name] == []


# Redis.


@pytest.fixture(scope="module")
def redis_port() -> Iterator[int]:
    """A Redis server."""
    with redis_server() as port:
        yield port


@pytest.fixture
async def line(redis_port: int) -> AsyncIterator[Relay]:
    """The way to it."""
    async with relay(redis_port) as found:
        yield found


def redis_flags(port: int, **more: object) -> list[str]:
    settings = {"host": HOST, "port": port, "socket_timeout": 4000, **more}
    return [f"--cache-config=redis,{key}={value}" for key, value in settings.items()]


@pytest.mark.own_models("the files of models")
def test_servers_share_a_redis(models: Path, redis_port: int) -> None:
    found = []
    for _ in range(2):
        with (
            serving(models, *redis_flags(redis_port)) as server,
            httpx.Client(base_url=server.http) as http,
        ):
            [output] = post(http, "batched", [1, 2], shape=[1, 2]).json()["outputs"]
            assert output["data"] == [1, 2]
            found.append(settled_counts(http, "batched"))
            assert "nv_cache_util" not in server.metrics()
            assert server.metrics()["nv_cache_num_lookups"] == 1
    assert found == [misses_then_hits(1, 0), misses_then_hits(1, 1)]


async def test_requests_are_answered_while_redis_hangs_and_after_it_exits(
    models: Path, line: Relay
) -> None:
    server = Serving(models, redis_flags(line.port, socket_timeout=50))
    try:
        await asyncio.to_thread(server.wait_ready)
        async with httpx.AsyncClient(base_url=server.http) as http:
            tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, 1], "data": [1]}
            for step in ("up", "hung", "still hung", "gone"):
                if step == "hung":
                    line.flowing.clear()
                if step == "gone":
                    await line.cut()
                found = await http.post("/v2/models/batched/infer", json={"inputs": [tensor]})
                assert (found.status_code, step) == (200, step)
    finally:
        assert await asyncio.to_thread(server.stop) == 0
    assert "redis does not answer" in server.text


# What the server cannot start with.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cache-config=local,x=1"], "there is no setting 'x'"),
        (["--cache-config=local"], "No cache specified."),
        (["--cache-config=redis,host=h"], "didn't specify address"),
        (redis_flags(1), f"Failed to connect to Redis at {HOST}:1"),
        (
            ["--cache-config=local,size=9", "--response-cache-byte-size=9"],
            "Incompatible flags --response-cache-byte-size and --cache-config",
        ),
    ],
)
def test_the_server_says_why_it_does_not_start(
    models: Path, flags: list[str], message: str
) -> None:
    server = Serving(models, flags)
    assert server.process.wait(30) == 1
    server.stop()
    assert message in server.text
    assert "Traceback" not in server.text
