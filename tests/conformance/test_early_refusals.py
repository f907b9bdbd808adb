"""Requests over a limit of their tenant are refused by their head: the body is not read."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from gateway.policy.keys import Role, new_key
from tests.conformance.keys import ECHO, INFER, bearer, message_of, stored, write
from tests.conformance.models import CATALOGUE, REPEAT
from tests.conformance.openai_models import contract, step
from tests.raw import Answer, Connection, post
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving, serving, write_model

pytestmark = pytest.mark.runs_on("grpcio", "frontends")

RULES = {
    "spent": "requests_per_minute = 0.5\nburst = 2",
    "full": "max_in_flight = 1\nrequests_per_minute = 1\nburst = 200",
    "once": "requests_per_minute = 0.5\nburst = 2",
}
"""`spent` has used its only request, `full` has one in flight."""
KEYS = {name: new_key() for name in (*RULES, "free", "admin")}
LONG = 4 << 20
GENERATE = "/v2/models/repeat/generate"
CHAT = "/v1/chat/completions"
PATHS: Mapping[str, str] = {
    INFER: "single",
    GENERATE: "repeat",
    f"{GENERATE}_stream": "repeat",
    CHAT: "",
    "/v1/embeddings": "",
}
"""The model that each path names."""
REFUSED = "gateway_refused_total"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
LASTING = {"text_input": "x", "n": 100_000, "delay_us": 10_000}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], server_kind: None
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("early")
    models = folder / "models"
    write_model(models, "single", CATALOGUE["single"])
    write_model(models, "repeat", REPEAT)
    write_model(models, "chat", contract(step({"object": "chat.completion"}, final=True)))
    tables = [f"[tenants.{name}]\n{rules}" for name, rules in RULES.items()]
    roles = {"admin": frozenset(Role)}
    infer = frozenset({Role.INFER})
    texts = [stored(key, name, roles=roles.get(name, infer)) for name, key in KEYS.items()]
    write(folder / "keys.toml", *tables, *texts)
    flags = (f"--api-keys={folder / 'keys.toml'}", "--metrics-open=true")
    with serving(models, *flags, environment=environment) as started:
        assert whole(started, "spent", INFER, ECHO).status_code == 200
        with Connection(started.ports["http"]) as stream:
            stream.ask(f"{GENERATE}_stream", LASTING, line("full"))
            assert stream.head().status == 200
            yield started
    assert "Traceback" not in started.text


def line(name: str) -> str:
    return f"x-api-key: {KEYS[name][0]}"


def metadata(name: str) -> list[tuple[str, str]]:
    return [("x-api-key", KEYS[name][0])]


def whole(server: Serving, name: str, path: str, body: Any, **headers: str) -> httpx.Response:
    headers |= bearer(KEYS[name][0])
    return httpx.post(f"{server.http}{path}", json=body, headers=headers, timeout=WAIT_SECS)


def tenant(server: Serving, name: str) -> Any:
    """The account of a tenant."""
    url, headers = f"{server.http}/admin/tenants", bearer(KEYS["admin"][0])
    rows = httpx.get(url, headers=headers, timeout=WAIT_SECS).json()["tenants"]
    (found,) = [each for each in rows if each["tenant"] == name]
    return found


def refused(server: Serving, model: str) -> float:
    """The refusals of a model so far."""
    version = "1" if model else ""
    labels = f'model="{model}",reason="rate_limited",version="{version}"'
    return server.metrics().get(f"{REFUSED}{{{labels}}}", 0.0)


def check(answer: Answer, text: str) -> None:
    assert answer.status == 429
    assert answer.headers["x-refused-reason"] == "rate_limited"
    assert answer.headers["x-should-retry"] == "true"
    assert int(answer.headers["retry-after-ms"]) > 0
    assert "x-ratelimit-limit-requests" in answer.headers
    error = answer.json["error"]
    message = error["message"] if isinstance(error, dict) else error
    assert message.startswith(text)


SPENT = "tenant 'spent' has 0 of 0.5 requests per minute left, the request needs 1: in "
FULL = "tenant 'full' has 1 requests in flight, the most of 1"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "text"), [("spent", SPENT), ("full", FULL)])
def test_a_long_body_is_not_awaited_and_the_connection_closes(
    server: Serving, path: str, name: str, text: str
) -> None:
    before = refused(server, PATHS[path])
    with Connection(server.ports["http"]) as connection:
        head, _, _ = post(
            path, b" " * LONG, line(name), "Content-Type: application/json"
        ).partition(b"\r\n\r\n")
        connection.send(head + b"\r\n\r\n")
        answer = connection.answer()
        check(answer, text)
        assert answer.headers["connection"] == "close"
        connection.send(b" " * LONG)  # the client has the answer, and is not reset
        assert connection.ended
    assert refused(server, PATHS[path]) == before + 1


@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked", "Expect: 100-continue"])
def test_a_body_without_a_length_and_one_that_waits_are_not_awaited(
    server: Serving, framing: str
) -> None:
    length = "Content-Length: 100\r\n" if framing.startswith("Expect") else ""
    with Connection(server.ports["http"]) as connection:
        head = (
            f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n{line('spent')}\r\n{length}{framing}\r\n"
        )
        connection.send(f"{head}\r\n".encode())
        answer = connection.answer()
        check(answer, SPENT)
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("path", [each for each in PATHS if each != INFER])
def test_a_connection_serves_others_after_a_short_body(server: Serving, path: str) -> None:
    """A body that is no JSON is refused by the limit: nothing of it is decoded.

    That of an infer is: it has arrived with its head.
    """
    type_ = "Content-Type: application/json"
    with Connection(server.ports["http"]) as connection:
        for _ in range(2):
            connection.send(post(path, b"no JSON", type_, line("spent")))
            answer = connection.answer()
            check(answer, SPENT)
            assert "connection" not in answer.headers
            connection.ask(INFER, ECHO, line("free"))
            assert connection.answer().status == 200


@pytest.mark.parametrize(("name", "costs"), [("spent", 0), ("full", 1)])
def test_a_refusal_by_the_head_costs_what_that_of_a_request_does(
    server: Serving, name: str, costs: int
) -> None:
    """By the limit of requests nothing, by that of requests in flight one request."""

    before = tenant(server, name)
    for path in (INFER, GENERATE, CHAT):
        assert whole(server, name, path, {}).status_code == 429
    after = tenant(server, name)
    assert sum(after["refused"].values()) == sum(before["refused"].values()) + 3
    reset, reset_after = (each["buckets"]["requests"]["reset_secs"] for each in (before, after))
    secs = 60 / before["rules"]["requests_per_minute"]
    assert round((reset_after - reset) / secs) == 3 * costs


def test_an_unknown_model_is_not_found_and_has_no_refusal(server: Serving) -> None:
    before = tenant(server, "spent")["refused"]
    for path in ("/v2/models/absent/infer", "/v2/models/absent/generate"):
        assert whole(server, "spent", path, {}).status_code == 404
    assert tenant(server, "spent")["refused"] == before


@pytest.mark.own_models("the limit of one process")
def test_a_repeated_request_with_its_key_is_answered_over_the_limit(server: Serving) -> None:
    key = {"Idempotency-Key": "one"}
    body = {"inputs": [{**ECHO["inputs"][0], "data": ["x" * (256 << 10)]}]}
    first = whole(server, "once", INFER, body, **key)
    assert first.status_code == 200
    again = whole(server, "once", INFER, body, **key)
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["idempotency-replayed"] == "true"
    other = whole(server, "once", INFER, body)
    assert (other.status_code, message_of(other)[:13]) == (429, "tenant 'once'")


def large(model: str, request_id: str = "") -> Any:
    """A message whose only input has a wrong name and a megabyte."""
    return infer_request(model, request_id, WRONG="x" * (1 << 20))


def unparsable(model: str) -> bytes:
    """A message with an input that is none."""
    head: bytes = service_pb2.ModelInferRequest(model_name=model).SerializeToString()
    junk = b"\xff" * (1 << 20)
    return head + b"\x2a\x80\x80\x40" + junk


def status_of(server: Serving, name: str, message: bytes) -> tuple[Any, str]:
    """The status of ModelInfer, and its text."""
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(METHOD)(message, metadata=metadata(name), timeout=WAIT_SECS)
    error: Any = caught.value
    return error.code(), error.details()


def test_a_large_message_is_refused_before_its_inputs_are_parsed(server: Serving) -> None:
    before = refused(server, "single")
    for name, text in (("spent", SPENT), ("full", FULL)):
        code, details = status_of(server, name, unparsable("single"))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details.startswith(text)
    assert refused(server, "single") == before + 2
    code, details = status_of(server, "free", unparsable("single"))
    assert (code, details) == (grpc.StatusCode.INTERNAL, "Unable to parse request")


def test_a_large_message_to_another_model_has_its_own_error(server: Serving) -> None:
    before = tenant(server, "spent")["refused"]
    for model, expected in (
        ("absent", grpc.StatusCode.NOT_FOUND),
        ("repeat", grpc.StatusCode.UNIMPLEMENTED),
    ):
        code, _ = status_of(server, "spent", large(model).SerializeToString())
        assert code is expected
    assert tenant(server, "spent")["refused"] == before


def test_large_messages_of_a_stream_are_refused_and_it_continues(server: Serving) -> None:
    before = [refused(server, model) for model in ("single", "repeat")]
    with (
        connected(server.grpc) as stub,
        streaming(stub, metadata("spent")) as rpc,
        streaming(stub, metadata("free")) as neighbour,
    ):
        for request_id, model in (("1", "single"), ("2", "repeat")):
            rpc.ask(large(model, request_id))
            answer = rpc.answer()
            assert answer.error_message.startswith(SPENT)
            assert answer.infer_response.id == request_id
            parameters = answer.infer_response.parameters
            assert parameters["refused_reason"].string_param == "rate_limited"
            assert parameters["retry_after_ms"].int64_param > 0
            neighbour.ask(infer_request("single", INPUT="hi"))
            assert not neighbour.answer().error_message
        rpc.ask(large("absent", "3"))
        assert "'absent' is not found" in rpc.answer().error_message
        assert rpc.rest() == []
    after = [refused(server, model) for model in ("single", "repeat")]
    assert after == [count + 1 for count in before]


def test_a_large_message_that_cancels_or_resumes_is_not_refused(server: Serving) -> None:
    before = tenant(server, "spent")["refused"]
    cancelling, resuming = large("single", "none"), large("repeat", "none")
    cancelling.parameters["cancel"].bool_param = True
    resuming.parameters["resume"].string_param = "none"
    with connected(server.grpc) as stub, streaming(stub, metadata("spent")) as rpc:
        rpc.ask(cancelling)
        assert "runs no request with the id 'none'" in rpc.answer().error_message
        rpc.ask(resuming)
        assert "there is no such stream" in rpc.answer().error_message
    assert tenant(server, "spent")["refused"] == before


def test_a_neighbour_is_served_while_long_bodies_are_refused(server: Serving) -> None:
    """Refused clients send their bodies all the same, and send others on new connections."""
    body = json.dumps(ECHO).encode().ljust(LONG)
    for _ in range(8):
        with Connection(server.ports["http"]) as connection:
            connection.send(post(INFER, body, line("spent")))
            check(connection.answer(), SPENT)
            answer = whole(server, "free", INFER, ECHO)
            assert answer.json()["outputs"][0]["data"] == ["hi"]
            assert connection.ended
