"""Tenants: names that clients choose are those of their tenant; a revoked key ends its streams."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from gateway.policy.keys import Role, new_key
from tests.conformance.keys import NOTICED_SECS, stored, write
from tests.conformance.models import CATALOGUE, REPEAT, identity
from tests.leaving import IN_FLIGHT, accepted
from tests.raw import Connection
from tests.regions import shared_object
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving, series, serving, wait_until, write_model

pytestmark = pytest.mark.runs_on("grpcio", "frontends")

KEYS = {name: new_key() for name in ("a", "a again", "b", "revoked")}
NARROW = new_key()
"""The key of a tenant for which one model exists."""
ROLES = frozenset({Role.INFER, Role.ADMIN})
REGION = "r"
INPUT: dict[str, Any] = {"name": "INPUT", "datatype": "BYTES", "shape": [1]}
LONG = {"text_input": "x", "n": 100_000, "delay_us": 10_000}
STREAM = "/v2/models/repeat/generate_stream"
NO_LONGER = "the credential of the request is no longer valid"
NAMING_A = {"X-Tenant": "a", "X-User-Id": "a", "X-Gateway-Inference-Fairness-Id": "a"}
"""Headers that name a tenant: only the key of a request does."""

SEQUENCES = """sequence_batching {
  max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 4 }
}
"""
COUNTING = identity("BYTES", "1") + SEQUENCES
CACHED = identity("BYTES", "1") + "response_cache { enable: true }\n"


def text_of(*names: str) -> str:
    """A key file with the keys of those names, whose first words are their tenants."""
    found = [stored(KEYS[name], name.split()[0], roles=ROLES) for name in names]
    return "\n".join([*found, stored(NARROW, "narrow", models=("sing*",))])


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory, server_kind: None) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(file, text_of(*KEYS))
    return file


@pytest.fixture(scope="module")
def server(
    key_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
) -> Iterator[Serving]:
    models = tmp_path_factory.mktemp("models")
    write_model(models, "repeat", REPEAT)
    write_model(models, "endless", CATALOGUE["endless"])
    write_model(models, "stuck", CATALOGUE["stuck"])
    write_model(models, "counting", COUNTING)
    write_model(models, "cached", CACHED)
    write_model(models, "single", CATALOGUE["single"])
    write_model(models, "chatting", CATALOGUE["chatting_once"])
    flags = (f"--api-keys={key_file}", "--metrics-open=true", "--exit-timeout-secs=1")
    flags = (*flags, "--cache-config=local,size=1048576", "--allow-client-shm=true")
    with serving(models, *flags, environment=environment) as started:
        yield started
    assert "Traceback" not in started.text


@pytest.fixture(autouse=True)
def at_rest(server: Serving) -> Iterator[None]:
    """No request is left for the next test, which counts its own."""
    yield
    for model in ("repeat", "endless", "stuck"):
        server.wait_metric(IN_FLIGHT, model, 0)


def header(name: str) -> dict[str, str]:
    return {"x-api-key": KEYS[name][0]}


def line(name: str) -> str:
    return f"x-api-key: {KEYS[name][0]}"


def metadata(name: str) -> list[tuple[str, str]]:
    return list(header(name).items())


def post(server: Serving, name: str, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(
        f"{server.http}{path}", json=body, headers={**header(name), **headers}, timeout=WAIT_SECS
    )


def infer(server: Serving, name: str, model: str, text: str, **parameters: Any) -> httpx.Response:
    body = {"inputs": [{**INPUT, "data": [text]}], "parameters": parameters}
    return post(server, name, f"/v2/models/{model}/infer", body)


def cancelling(model: str, request_id: str) -> Any:
    """The message that cancels a request."""
    message = infer_request(model, request_id)
    message.parameters["cancel"].bool_param = True
    return message


def test_a_request_is_cancelled_by_its_own_tenant_only(server: Serving) -> None:
    cancel = "/v2/models/repeat/requests/one/cancel"
    with Connection(server.ports["http"]) as stream:
        with accepted(server, "repeat"):
            stream.ask(STREAM, {**LONG, "id": "one"}, line("a"))
        refused = post(server, "b", cancel, {"tenant": "a", "user": "a"}, **NAMING_A)
        assert refused.status_code == 404
        assert "runs no request with the id 'one'" in refused.json()["error"]
        assert post(server, "a again", cancel, {}).status_code == 200
        assert stream.answer().body
    server.wait_metric(IN_FLIGHT, "repeat", 0)


def test_a_request_of_another_rpc_is_cancelled_by_its_own_tenant_only(server: Serving) -> None:
    with (
        connected(server.grpc) as stub,
        streaming(stub, metadata=metadata("a")) as rpc,
        streaming(stub, metadata=metadata("b")) as stranger,
        streaming(stub, metadata=metadata("a again")) as own,
    ):
        with accepted(server, "repeat"):
            rpc.ask(infer_request("repeat", "one", **LONG))
        stranger.ask(cancelling("repeat", "one"))
        assert "runs no request with the id 'one'" in stranger.answer().error_message
        own.ask(cancelling("repeat", "one"))
        server.wait_metric(IN_FLIGHT, "repeat", 0)


def test_a_stream_is_resumed_by_its_own_tenant_only(server: Serving) -> None:
    with Connection(server.ports["http"]) as stream:
        short = {"text_input": "x", "n": 3, "resumable": True}
        stream.ask(STREAM, short, line("a"))
        token = stream.answer().headers["sluice-stream"]
    event = {"Last-Event-ID": f"{token}.1"}
    for name, status in (("b", 404), ("a again", 200)):
        answer = httpx.get(f"{server.http}{STREAM}", headers={**header(name), **event})
        assert answer.status_code == status
    assert answer.text.count("data: ") == 2


def test_an_idempotency_key_is_that_of_a_tenant(server: Serving) -> None:
    path, key = "/v2/models/repeat/generate", {"Idempotency-Key": "one"}

    def ask(name: str, text: str) -> httpx.Response:
        return post(server, name, path, {"text_input": text, "n": 1}, **key)

    assert ask("a", "x").json()["text_output"] == "x"
    other = ask("b", "y")
    assert (other.status_code, other.json()["text_output"]) == (200, "y")
    assert "idempotency-replayed" not in ask("b", "z").headers or ask("b", "z").status_code == 422
    assert ask("a again", "x").headers["idempotency-replayed"] == "true"
    assert ask("b", "x").status_code == 422


def test_a_sequence_is_continued_by_its_own_tenant_only(server: Serving) -> None:
    first = infer(server, "a", "counting", "x", sequence_id=7, sequence_start=True)
    assert first.status_code == 200
    refused = infer(server, "b", "counting", "x", sequence_id=7)
    assert "must specify the START flag" in refused.json()["error"]
    own = infer(server, "b", "counting", "x", sequence_id=7, sequence_start=True)
    assert own.status_code == 200
    for name in ("a again", "b"):
        last = infer(server, name, "counting", "x", sequence_id=7, sequence_end=True)
        assert last.status_code == 200
    assert "has a conflict" not in server.text


def test_a_conversation_is_continued_by_its_own_tenant_only(server: Serving) -> None:
    def turn(name: str, **parameters: Any) -> httpx.Response:
        text = '[{"role": "user", "content": "hi"}]'
        asked = {"name": "messages", "datatype": "BYTES", "shape": [1], "data": [text]}
        body = {"inputs": [asked], "parameters": {"sequence_id": "talk", **parameters}}
        return post(server, name, "/v2/models/chatting/infer", body)

    assert turn("a", sequence_start=True).status_code == 200
    refused = turn("b")
    assert "conversation 'talk' of model 'chatting' is not open" in refused.json()["error"]
    assert turn("b", sequence_start=True).status_code == 200
    assert turn("a again").status_code == 200


def test_a_cached_response_is_that_of_a_tenant(server: Serving) -> None:
    def hits() -> float:
        return server.metrics()[series("nv_cache_num_hits_per_model", "cached")]

    for name, expected in (("a", 0), ("b", 0), ("a again", 1), ("b", 2)):
        assert infer(server, name, "cached", "x").status_code == 200
        assert hits() == expected


def test_a_region_is_that_of_a_tenant(server: Serving) -> None:
    with (
        shared_object(b"\x01\0\0\0A") as first,
        shared_object(b"\x01\0\0\0B") as second,
        connected(server.grpc) as stub,
    ):
        for name, key in (("a", first), ("b", second)):
            asked = {"key": key, "byte_size": 5}
            path = f"/v2/systemsharedmemory/region/{REGION}/register"
            assert post(server, name, path, asked).status_code == 200
            rows = httpx.get(f"{server.http}/v2/systemsharedmemory/status", headers=header(name))
            assert [row["key"] for row in rows.json()] == [key]
            found = stub.SystemSharedMemoryStatus(
                service_pb2.SystemSharedMemoryStatusRequest(), metadata=metadata(name)
            )
            assert [row.key for row in found.regions.values()] == [key]
        for name, content in (("a again", "A"), ("b", "B")):
            parameters = {"shared_memory_region": REGION, "shared_memory_byte_size": 5}
            shared = {**INPUT, "parameters": parameters}
            answer = post(server, name, "/v2/models/single/infer", {"inputs": [shared]})
            assert answer.json()["outputs"][0]["data"] == [content]
            message = service_pb2.ModelInferRequest(model_name="single")
            tensor = message.inputs.add(**INPUT)
            tensor.parameters["shared_memory_region"].string_param = REGION
            tensor.parameters["shared_memory_byte_size"].int64_param = 5
            raw = stub.ModelInfer(message, metadata=metadata(name)).raw_output_contents
            assert raw[0][4:] == content.encode()
        path = "/v2/systemsharedmemory/unregister"
        assert post(server, "b", path, {}).status_code == 200
        gone = httpx.get(f"{server.http}/v2/systemsharedmemory/status", headers=header("b"))
        left = httpx.get(f"{server.http}/v2/systemsharedmemory/status", headers=header("a"))
        assert (gone.json(), [row["key"] for row in left.json()]) == ([], [first])


def test_other_models_than_those_of_a_key_do_not_exist_for_it(server: Serving) -> None:
    headers = {"x-api-key": NARROW[0]}

    def asked(path: str, body: Any = None) -> tuple[int, str]:
        method = "GET" if body is None else "POST"
        url = f"{server.http}{path}"
        answer = httpx.request(method, url, json=body, headers=headers, timeout=WAIT_SECS)
        return answer.status_code, answer.text

    inputs = {"inputs": [{**INPUT, "data": ["x"]}]}
    assert asked("/v2/models/single/infer", inputs)[0] == 200
    assert asked("/v2/models/single")[0] == 200
    for path, body in (
        ("/v2/models/NAME/infer", inputs),
        ("/v2/models/NAME/generate", {"text_input": "x", "n": 1}),
        ("/v2/models/NAME/generate_stream", {"text_input": "x", "n": 1}),
        ("/v2/models/NAME/requests/one/cancel", {}),
        ("/v2/models/NAME", None),
        ("/v1/completions", {"model": "NAME", "prompt": "x"}),
    ):
        known, absent = (
            asked(path.replace("NAME", name), body and {**body, "model": name})
            for name in ("repeat", "absent")
        )
        assert known[0] == 404
        assert known[1].replace("repeat", "absent") == absent[1]
    rows = httpx.get(f"{server.http}/playground/models", headers=headers).json()["models"]
    assert [row["name"] for row in rows] == ["single"]
    named = list(headers.items())
    with connected(server.grpc) as stub, streaming(stub, metadata=named) as rpc:
        rpc.ask(infer_request("repeat", "one", **LONG))
        assert "'repeat' is not found" in rpc.answer().error_message
        with pytest.raises(grpc.RpcError, match="'repeat' is not found") as caught:
            stub.ModelInfer(infer_request("repeat", **LONG), metadata=named)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert stub.ModelInfer(infer_request("single", INPUT="x"), metadata=named).outputs


def test_a_revoked_key_ends_its_streams_and_no_others(server: Serving, key_file: Path) -> None:
    with (
        Connection(server.ports["http"]) as revoked,
        Connection(server.ports["http"]) as waiting,
        Connection(server.ports["http"]) as kept,
        connected(server.grpc) as stub,
        streaming(stub, metadata=metadata("revoked")) as rpc,
    ):
        with accepted(server, "repeat"):
            revoked.ask(STREAM, LONG, line("revoked"))
        with accepted(server, "repeat"):
            kept.ask(STREAM, LONG, line("a"))
        with accepted(server, "stuck"):
            waiting.ask("/v2/models/stuck/generate", {"INPUT": "x"}, line("revoked"))
        with accepted(server, "endless"):
            rpc.ask(infer_request("endless", "one", INPUT="x"))
        write(key_file, text_of("a", "a again", "b"))
        wait_until(
            lambda: server.metric(IN_FLIGHT, "repeat") == 1, "the stream has ended", NOTICED_SECS
        )
        assert revoked.answer().body.endswith(f'data: {{"error":"{NO_LONGER}"}}\n\n'.encode())
        assert waiting.answer().json == {"error": NO_LONGER}
        assert rpc.answer().error_message == NO_LONGER
        rpc.ask(infer_request("repeat", "two", **LONG))
        assert rpc.answer().error_message == NO_LONGER
        assert server.metric(IN_FLIGHT, "endless") == server.metric(IN_FLIGHT, "stuck") == 0
        assert server.metric(IN_FLIGHT, "repeat") == 1
        assert post(server, "revoked", "/v2/models/repeat/generate", {}).status_code == 401
