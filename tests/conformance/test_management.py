"""Health, metadata, configuration and statistics: the same on both wires, for all four clients."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from gateway.metadata import EXTENSIONS
from tests.conformance.clients import Client, connect, tensor
from tests.serving import WAIT_SECS, Serving

SERVICE = "inference.GRPCInferenceService"
TOO_LARGE = "9" * 20
ABSURD = "9" * 5000
NO_NUMBER = (
    "failed to get model version from specified version string '{}' (details: stol), version "
    "should be an integral value > 0"
)
UNKNOWN = [
    ("nope", "", "NOT_FOUND", "Request for unknown model: 'nope' is not found"),
    ("nope", "1", "NOT_FOUND", "Request for unknown model: 'nope' is not found"),
    ("repeat", "7", "NOT_FOUND", "Request for unknown model: 'repeat' version 7 is not found"),
    ("repeat", "0", "NOT_FOUND", "Request for unknown model: 'repeat' version 0 is not found"),
    (
        "versioned",
        "2",
        "NOT_FOUND",
        "Request for unknown model: 'versioned' version 2 is not found",
    ),
    ("repeat", TOO_LARGE, "INVALID_ARGUMENT", NO_NUMBER.format(TOO_LARGE)),
    ("repeat", ABSURD, "INVALID_ARGUMENT", NO_NUMBER.format(ABSURD)),
]
HEALTH = health_pb2.HealthCheckResponse


@pytest.fixture(scope="module")
def channel(server: Serving) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as found:
        yield found


async def test_a_server_with_its_models_loaded_is_live_and_ready(client: Client) -> None:
    assert await client.call("is_server_live") is True
    assert await client.call("is_server_ready") is True


def test_health_over_http_has_an_empty_body(http: httpx.Client) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/repeat/ready"):
        answer = http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")


async def test_server_metadata_names_the_server_and_what_it_can(client: Client) -> None:
    found = await client.server_metadata()
    assert found.name == "triton"
    assert list(found.extensions) == list(EXTENSIONS)


def test_server_metadata_is_compact_json_in_the_order_of_the_protocol(http: httpx.Client) -> None:
    answer = http.get("/v2")
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == json.dumps(answer.json(), separators=(",", ":")).encode()
    assert list(answer.json()) == ["name", "version", "extensions"]


@pytest.mark.parametrize(
    ("model", "version", "ready"),
    [
        *(("repeat", "", True), ("repeat", "1", True), ("versioned", "3", True)),
        *(("nope", "", False), ("repeat", "7", False), ("repeat", "0", False)),
    ],
)
async def test_model_ready_is_yes_or_no(
    client: Client, model: str, version: str, ready: bool
) -> None:
    assert await client.call("is_model_ready", model, version) is ready


def test_model_ready_over_http_says_why_not(http: httpx.Client) -> None:
    answer = http.get("/v2/models/nope/ready")
    assert answer.status_code == 404
    assert answer.json() == {"error": "Request for unknown model: 'nope' is not found"}


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
async def test_model_ready_over_grpc_refuses_what_is_no_version(client: Client) -> None:
    found = await client.refusal("is_model_ready", "repeat", "one")
    assert found == ("INVALID_ARGUMENT", NO_NUMBER.format("one"))


async def test_metadata_without_a_version_lists_every_ready_one(client: Client) -> None:
    found = await client.metadata("versioned")
    assert (found.name, list(found.versions), found.platform) == (
        "versioned",
        ["1", "3"],
        "identity",
    )
    assert tensors(found.inputs) == [("INPUT", "FP32", [-1])]
    assert tensors(found.outputs) == [("OUTPUT", "FP32", [-1])]


async def test_metadata_of_a_version_lists_only_that_one(client: Client) -> None:
    assert list((await client.metadata("versioned", "1")).versions) == ["1"]


async def test_metadata_shows_a_batch_dimension_and_optional_inputs(client: Client) -> None:
    assert tensors((await client.metadata("batched")).inputs) == [("INPUT", "FP32", [-1, 16])]
    assert [name for name, _, _ in tensors((await client.metadata("pair")).inputs)] == list("ABC")


async def test_the_config_is_the_one_in_force(client: Client) -> None:
    found = await client.config("repeat")
    assert (found.name, found.backend, found.max_batch_size) == ("repeat", "repeat", 0)
    assert [each.name for each in found.input] == ["text_input", "n", "delay_us"]
    assert found.model_transaction_policy.decoupled
    assert found.version_policy.latest.num_versions == 1
    assert [(each.name, each.count) for each in found.instance_group] == [("repeat", 1)]
    assert found.optimization.input_pinned_memory.enable


async def test_a_version_has_the_config_of_its_model(client: Client) -> None:
    assert await client.config("versioned", "1") == await client.config("versioned")


def test_both_wires_show_the_same_config(server: Serving, http: httpx.Client) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for model in ("repeat", "batched", "three", "two_at_once", "versioned"):
            shown = http.get(f"/v2/models/{model}/config").json()
            message = json_format.ParseDict(shown, model_config_pb2.ModelConfig())
            request = service_pb2.ModelConfigRequest(name=model)
            assert stub.ModelConfig(request, timeout=WAIT_SECS).config == message


@pytest.mark.parametrize(("model", "version", "code", "message"), UNKNOWN)
@pytest.mark.parametrize("method", ["get_model_metadata", "get_model_config"])
async def test_an_unknown_model_or_version_is_refused_with_tritons_text(
    client: Client, method: str, model: str, version: str, code: str, message: str
) -> None:
    found_code, found = await client.refusal(method, model, version)
    head, _, tail = found.partition("...")  # over HTTP very long messages lack their middle
    assert found_code == client.code(code)
    assert message.startswith(head)
    assert message.endswith(tail)
    assert len(found) >= min(len(message), 4096)


@pytest.mark.parametrize("method", ["get_model_metadata", "get_model_config"])
async def test_a_version_that_is_no_number_is_refused(client: Client, method: str) -> None:
    code, message = await client.refusal(method, "repeat", "one")
    if client.over_http:  # The path does not match (protocol: HTTP routes).
        assert (code, message) == ("404", "Not Found")
    else:
        assert (code, message) == ("INVALID_ARGUMENT", NO_NUMBER.format("one"))


@pytest.mark.parametrize("client", ["grpc", "grpc.aio"], indirect=True)
async def test_a_negative_version_is_refused(client: Client) -> None:
    assert await client.refusal("get_model_metadata", "repeat", "-1") == (
        "INVALID_ARGUMENT",
        "invalid model version specified '-1' , version should be an integral value > 0",
    )


@pytest.mark.parametrize(
    ("model", "version", "message"),
    [
        ("nope", "", "requested model 'nope' is not available"),
        ("repeat", "7", "requested model version is not available for model 'repeat'"),
        ("repeat", TOO_LARGE, NO_NUMBER.format(TOO_LARGE)),
    ],
)
async def test_statistics_of_what_is_unknown_are_an_invalid_argument(
    client: Client, model: str, version: str, message: str
) -> None:
    found = await client.refusal("get_inference_statistics", model, version)
    assert found == (client.code("INVALID_ARGUMENT"), message)


async def test_statistics_have_a_row_for_every_ready_version(client: Client) -> None:
    every = (await client.statistics()).model_stats
    rows = [(row.name, row.version) for row in every]
    assert rows == sorted(rows)
    assert {("versioned", "1"), ("versioned", "3"), ("repeat", "1")} <= set(rows)
    of_one = (await client.statistics("versioned")).model_stats
    assert [(row.name, row.version) for row in of_one] == [("versioned", "1"), ("versioned", "3")]
    of_version = (await client.statistics("versioned", "3")).model_stats
    assert [(row.name, row.version) for row in of_version] == [("versioned", "3")]


def test_statistics_over_http_show_every_member_at_zero_traffic(http: httpx.Client) -> None:
    (row,) = http.get("/v2/models/nested/stats").json()["model_stats"]
    nothing = {"count": 0, "ns": 0}
    members = ["success", "fail", "queue", "compute_input", "compute_infer", "compute_output"]
    assert row == {
        "name": "nested",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": dict.fromkeys([*members, "cache_hit", "cache_miss"], nothing),
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_statistics_count_batch_items_as_inferences_and_agree_with_metrics(
    server: Serving, wire: str
) -> None:
    async with connect(server, wire) as reporter, connect(server, "grpc") as asker:
        before = row_of(await reporter.statistics("batched"))
        inputs = [tensor("INPUT", "FP32", np.ones((3, 16), dtype=np.float32))]
        for _ in range(2):
            await asker.call("infer", "batched", inputs)
        after = row_of(await reporter.statistics("batched"))
    assert gained(before, after) == {
        "inference_count": 6,
        "execution_count": 2,
        "success": 2,
        "queue": 2,
        "compute_infer": 2,
        "fail": 0,
    }
    metrics = {
        "nv_inference_request_success": after.inference_stats.success.count,
        "nv_inference_count": after.inference_count,
        "nv_inference_exec_count": after.execution_count,
    }
    assert {name: server.metric(name, "batched") for name in metrics} == metrics
    for part in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert_whole_microseconds(server, part, getattr(after.inference_stats, part))
    assert_whole_microseconds(server, "request", after.inference_stats.success)
    stats = after.inference_stats
    parts = stats.queue.ns + stats.compute_input.ns + stats.compute_infer.ns
    assert stats.success.ns >= parts + stats.compute_output.ns
    assert after.last_inference > before.last_inference
    (batch,) = after.batch_stats
    assert (batch.batch_size, batch.compute_infer.count) == (3, after.execution_count)


def assert_whole_microseconds(server: Serving, part: str, found: Any) -> None:
    """Each request counts in whole microseconds."""
    told = server.metric(f"nv_inference_{part}_duration_us", "batched")
    assert found.ns // 1000 - found.count <= told <= found.ns // 1000


def test_a_streamed_request_counts_once(server: Serving, http: httpx.Client) -> None:
    names = ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count")
    before = [server.metric(name, "repeat") for name in names]
    answer = http.post("/v2/models/repeat/generate_stream", json={"text_input": "x", "n": 9})
    assert answer.content.count(b"data: ") == 9
    assert [server.metric(name, "repeat") for name in names] == [count + 1 for count in before]


def test_a_refused_request_is_not_counted_and_a_failed_one_is(
    server: Serving, http: httpx.Client
) -> None:
    def counts() -> dict[str, float]:
        return {
            name: value
            for name, value in server.metrics().items()
            if 'model="failing"' in name and name.startswith("nv_inference_request_")
            if "duration" not in name
        }

    before = counts()
    assert http.post("/v2/models/failing/generate", json={}).status_code == 400
    assert counts() == before
    assert http.post("/v2/models/failing/generate", json={"INPUT": "x"}).status_code == 500
    changed = {name for name, value in counts().items() if value != before[name]}
    assert changed == {'nv_inference_request_failure{model="failing",reason="BACKEND",version="1"}'}


def test_metrics_are_prometheus_text_with_every_series_from_the_start(server: Serving) -> None:
    page = httpx.get(f"http://127.0.0.1:{server.ports['metrics']}/metrics")
    assert page.headers["content-type"].replace(" ", "").startswith("text/plain;")
    assert "# HELP nv_inference_request_success " in page.text
    assert "# TYPE nv_inference_request_success counter" in page.text
    reasons = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    for reason in reasons:
        assert server.metric("nv_inference_request_failure", "nested", reason=reason) == 0


def test_grpc_health_says_serving_for_the_server_and_its_service(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        request = health_pb2.HealthCheckRequest(service=service)
        assert stub.Check(request, timeout=WAIT_SECS).status == HEALTH.SERVING


def test_grpc_health_watch_tells_the_present_state_at_once(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=WAIT_SECS)
    assert next(watch).status == HEALTH.SERVING
    watch.cancel()


def test_reflection_lists_the_services(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=WAIT_SECS)
    found = {service.name for service in answer.list_services_response.service}
    assert found == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "sluice.RolloutService",
    }
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="sluice.RolloutService")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=WAIT_SECS)
    assert answer.file_descriptor_response.file_descriptor_proto


def test_an_unknown_method_of_the_service_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/ModelExplain")(b"", timeout=WAIT_SECS)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "path",
    [
        *("/v2/", "/v2/models/repeat/", "/v2/health/live/", "/v2/models/repeat/versions/1/"),
        *("/v1", "/v2/models", "/V2", "/v2/models/repeat/versions/abc", "/v2//models/repeat"),
    ],
)
def test_paths_match_exactly(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.content) == (404, b'{"error":"Not Found"}')


def test_the_query_string_is_ignored(http: httpx.Client) -> None:
    for query in ("verbose=1", "version=7", "version=abc", "model=nope"):
        assert http.get(f"/v2/models/repeat?{query}").status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
@pytest.mark.parametrize("path", ["/v2", "/v2/health/ready", "/v2/models/repeat"])
def test_a_wrong_method_is_refused(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 405
    assert answer.content == (b"" if method == "HEAD" else b'{"error":"Method Not Allowed"}')


def tensors(found: object) -> list[tuple[str, str, list[int]]]:
    return [(each.name, each.datatype, list(each.shape)) for each in found]


def row_of(statistics: object) -> object:
    (row,) = statistics.model_stats
    return row


def gained(before: object, after: object) -> dict[str, int]:
    counts = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("inference_count", "execution_count")
    }
    for name in ("success", "queue", "compute_infer", "fail"):
        old, new = getattr(before.inference_stats, name), getattr(after.inference_stats, name)
        counts[name] = new.count - old.count
    return counts
