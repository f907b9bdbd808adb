"""Refusals and limits as clients of each wire have them."""

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from gateway.in_process.server import Server
from gateway.policy.keys import Role, new_key
from tests.conformance.keys import ECHO, INFER, bearer, stored, write
from tests.conformance.models import CATALOGUE, REPEAT
from tests.conformance.openai_models import contract, piece, step
from tests.rpc import connected, infer_request, streaming
from tests.scripted import installed
from tests.serving import WAIT_SECS, write_model

RULES = {
    "one": "requests_per_minute = 0.5\nburst = 2",
    "few": "tokens_per_minute = 100",
    "many": "requests_per_minute = 60\ntokens_per_minute = 600\nburst = 100",
    "single": "max_in_flight = 1",
}
KEYS = {name: new_key() for name in (*RULES, "free", "admin")}
TEXT = {"text_input": "x", "n": 2}
CHAT = {"model": "whole", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
REQUESTS: Mapping[str, tuple[str, Any]] = {
    "infer": (INFER, ECHO),
    "generate": ("/v2/models/single/generate", {"INPUT": "x"}),
    "generate_stream": ("/v2/models/repeat/generate_stream", TEXT),
    "chat": ("/v1/chat/completions", CHAT),
    "chat_stream": ("/v1/chat/completions", {**CHAT, "model": "tokens", "stream": True}),
}
LIMIT = "x-ratelimit-limit-requests"


class Served:
    """A server whose tenants have the rules, and its clients by their tenant."""

    def __init__(self, server: Server, client: httpx.Client) -> None:
        self.server = server
        self.grpc = f"127.0.0.1:{server.ports['grpc']}"
        self._client = client
        del client.headers["accept-encoding"]

    def url(self, path: str, port: str = "http") -> str:
        return f"http://127.0.0.1:{self.server.ports[port]}{path}"

    def post(self, tenant: str, path: str, body: Any, **headers: str) -> httpx.Response:
        headers |= bearer(KEYS[tenant][0])
        return self._client.post(self.url(path), json=body, headers=headers)

    def get(self, tenant: str, path: str, port: str = "http") -> httpx.Response:
        return self._client.get(self.url(path, port), headers=bearer(KEYS[tenant][0]))


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("quotas")
    installed(folder / "installed")
    models = folder / "models"
    write_model(models, "tokens", contract(piece("a"), piece("b"), {"final": True}))
    write_model(models, "whole", contract(step({"object": "chat.completion"}, final=True)))
    write_model(models, "repeat", REPEAT)
    write_model(models, "single", CATALOGUE["single"])
    roles = {"admin": frozenset(Role)}
    infer = frozenset({Role.INFER})
    texts = [stored(key, name, roles=roles.get(name, infer)) for name, key in KEYS.items()]
    tables = [f"[tenants.{name}]\n{rules}" for name, rules in RULES.items()]
    write(folder / "keys.toml", *tables, *texts)
    options = {"api_keys": folder / "keys.toml", "metrics_open": True}
    wires = ("http", "grpc", "metrics")
    ports = {f"{name}_port": 0 for name in wires}
    addresses = {f"{name}_address": "127.0.0.1" for name in wires}
    with pytest.MonkeyPatch.context() as patch, httpx.Client(timeout=WAIT_SECS) as client:
        patch.syspath_prepend(str(folder / "installed"))
        transport = {"grpc_transport": request.param}
        with Server(model_repository=models, **transport, **options, **ports, **addresses) as found:
            started = Served(found, client)
            started.post("one", *REQUESTS["infer"])
            yield started


OVER_HTTP = pytest.mark.parametrize("served", ["hyper"], indirect=True)
OVER_GRPC = pytest.mark.parametrize("served", ["hyper", "grpcio"], indirect=True)


def metadata(name: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [("x-api-key", KEYS[name][0]), *more]


@OVER_HTTP
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_over_its_limit_is_refused_with_the_time_of_a_retry(
    served: Served, kind: str
) -> None:
    answer = served.post("one", *REQUESTS[kind])
    assert answer.status_code == 429
    shown = {
        "x-refused-reason": "rate_limited",
        "x-should-retry": "true",
        LIMIT: "0",
        "x-ratelimit-remaining-requests": "0",
    }
    assert shown.items() <= dict(answer.headers).items()
    assert answer.headers["retry-after"] == "60"
    assert answer.headers["retry-after-ms"] == "60000"
    text = "tenant 'one' has 0 of 0.5 requests per minute left, the request needs 1: in "
    error = answer.json()["error"]
    if kind.startswith("chat"):
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        error = error["message"]
    assert error.startswith(text)


@OVER_HTTP
@pytest.mark.parametrize("kind", ["chat", "chat_stream"])
def test_huge_max_tokens_are_refused_for_good(served: Served, kind: str) -> None:
    path, body = REQUESTS[kind]
    answer = served.post("few", path, {**body, "max_tokens": 2**63})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in answer.headers
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
    assert error["message"].startswith("tenant 'few' may use 100 tokens at once, the request needs")


@OVER_HTTP
@pytest.mark.parametrize("encoding", ["", "gzip"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_answers_have_the_limits_of_their_caller(served: Served, kind: str, encoding: str) -> None:
    """A whole response without an encoding is sent without a task."""
    headers = {"accept-encoding": encoding} if encoding else {}
    answer = served.post("many", *REQUESTS[kind], **headers)
    assert answer.status_code == 200
    assert answer.headers[LIMIT] == "60"
    assert 5000 < int(answer.headers["x-ratelimit-remaining-requests"]) < 6000
    assert answer.headers["x-ratelimit-reset-tokens"].endswith(("s", "ms"))
    free = served.post("free", *REQUESTS[kind], **headers)
    assert free.status_code == 200
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]


def trailing(served: Served, name: str, *more: tuple[str, str]) -> dict[str, Any]:
    """The trailing metadata of an inference over gRPC."""
    with connected(served.grpc) as stub:
        _, call = stub.ModelInfer.with_call(
            infer_request("single", INPUT="hi"), metadata=metadata(name, *more), timeout=WAIT_SECS
        )
        return dict(call.trailing_metadata())


@OVER_GRPC
def test_grpc_has_the_limits_for_a_client_that_asks_for_them(served: Served) -> None:
    wanted = ("x-want-limits", "1")
    assert trailing(served, "many", wanted)[LIMIT] == "60"
    assert LIMIT not in trailing(served, "many")
    assert LIMIT not in trailing(served, "free", wanted)
    with connected(served.grpc) as stub:
        asked = iter([infer_request("single", INPUT="hi")])
        rpc = stub.ModelStreamInfer(asked, metadata=metadata("many", wanted), timeout=WAIT_SECS)
        assert len(list(rpc)) == 1
        assert dict(rpc.trailing_metadata())[LIMIT] == "60"


@OVER_GRPC
def test_a_refusal_over_grpc_has_the_messages_of_google_rpc(served: Served) -> None:
    with connected(served.grpc) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(
            infer_request("single", INPUT="hi"), metadata=metadata("one"), timeout=WAIT_SECS
        )
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    found = dict(error.trailing_metadata())
    assert sum(len(name) + len(value) for name, value in found.items()) < 8192
    assert found[LIMIT] == "0"
    assert found["grpc-retry-pushback-ms"] == "60000"
    status = status_pb2.Status.FromString(found["grpc-status-details-bin"])
    assert (status.code, status.message) == (8, error.details())
    info, retry, quota = (
        kind()
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.RetryInfo,
            error_details_pb2.QuotaFailure,
        )
    )
    assert [each.Unpack(to) for each, to in zip(status.details, (info, retry, quota), strict=True)]
    assert (info.reason, info.domain) == ("RATE_LIMITED", "sluice")
    assert dict(info.metadata) == {"reason": "rate_limited", "limit": "requests"}
    assert retry.retry_delay.ToMilliseconds() == 60_000
    (violation,) = quota.violations
    assert (violation.subject, violation.description) == ("requests", error.details())


@OVER_GRPC
def test_a_refused_request_of_a_stream_leaves_the_stream(served: Served) -> None:
    """The first request is answered to its end; the second one is over the limit in flight."""
    first, second = (
        infer_request("repeat", each, text_input="x", n=50, delay_us=20_000) for each in "12"
    )
    with connected(served.grpc) as stub, streaming(stub, metadata("single")) as rpc:
        rpc.ask(first)
        rpc.answer()
        rpc.ask(second)
        messages = rpc.rest()
    (refused,) = [each for each in messages if each.error_message]
    assert refused.error_message == "tenant 'single' has 1 requests in flight, the most of 1"
    assert refused.infer_response.id == "2"
    parameters = refused.infer_response.parameters
    assert parameters["refused_reason"].string_param == "rate_limited"
    assert 1000 <= parameters["retry_after_ms"].int64_param <= 1500
    assert messages[-1] is not refused


@OVER_HTTP
def test_the_admin_sees_tenants_and_others_do_not(served: Served) -> None:
    assert served.get("many", "/admin/tenants").status_code == 403
    found = served.get("admin", "/admin/tenants").json()["tenants"]
    rows = {each["tenant"]: each for each in found}
    assert set(rows) == set(RULES)
    assert rows["one"]["rules"]["requests_per_minute"] == 0.5
    assert rows["one"]["buckets"]["requests"]["remaining"] < 1
    assert (rows["one"]["in_flight"], rows["one"]["waiting"]) == (0, 0)


@OVER_HTTP
def test_refusals_are_on_the_page_of_metrics(served: Served) -> None:
    served.post("one", *REQUESTS["infer"])
    page = served.get("one", "/metrics", "metrics")
    assert 'gateway_refused_total{model="single",reason="rate_limited",version="1"}' in page.text
