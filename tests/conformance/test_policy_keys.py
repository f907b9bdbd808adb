"""API keys: each route and each method needs a key with one of its roles."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from gateway.policy.areas import (
    AREA_OF_METHOD_CHANGE,
    AREA_OF_ROUTE_CHANGE,
    CHANGING,
    GRPC,
    HTTP,
    Area,
)
from gateway.policy.credentials import (
    MAY_CHANGE,
    MAY_READ,
    REFUSALS_AT_ONCE,
    REFUSALS_PER_SEC,
)
from gateway.policy.keys import Role, new_key
from tests.conformance.clients import tensor
from tests.conformance.keys import ECHO, INFER, bearer, message_of, status_of, stored, write
from tests.conformance.spellings import answer_of, filled, spellings
from tests.raw import Connection, post
from tests.serving import WAIT_SECS, Serving, serving

OVER_HTTP = pytest.mark.runs_on("frontends")
OVER_GRPC = pytest.mark.runs_on("grpcio", "frontends")

MISSING = "the API key is missing, expected 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
WRONG = "the API key is not valid"
KEYS = {role: new_key() for role in Role}
EXPIRED = new_key()
FLOOD = 640
FLOOD_SECS = (FLOOD - REFUSALS_AT_ONCE) / REFUSALS_PER_SEC
METRICS = Area.METRICS
ROUTES = [(area, path) for area, paths in HTTP.items() for path in paths if area is not METRICS]
METHODS = [(area, path) for area, paths in GRPC.items() for path in paths]


OF_ALL = (
    *(stored(made, roles=frozenset({role})) for role, made in KEYS.items()),
    stored(EXPIRED, expires=1e9),
)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(file, *OF_ALL)
    return file


@pytest.fixture(scope="module")
def server(
    repository: Path, environment: dict[str, str], server_kind: None, key_file: Path
) -> Iterator[Serving]:
    flags = (f"--api-keys={key_file}", "--model-control-mode=explicit", "--load-model=single")
    with serving(repository, *flags, environment=environment) as started:
        yield started
    assert started.process.returncode == 0
    assert "Traceback" not in started.text
    for key, _, _ in (*KEYS.values(), EXPIRED):
        assert key[20:] not in started.text


@pytest.fixture
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as client:
        yield client


@pytest.fixture(scope="module")
def channel(server: Serving) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as found:
        yield found


@pytest.mark.parametrize(("area", "path"), ROUTES)
@OVER_HTTP
def test_a_route_needs_a_key_with_its_role(http: httpx.Client, area: Area, path: str) -> None:
    key = bearer(KEYS[Role.ADMIN][0])
    allowed = http.request("PUT", filled(path), headers=key).headers.get("allow", "GET, POST")
    for method in {"GET", "HEAD", "POST"} & set(allowed.split(", ")):
        changes = method == CHANGING and path in AREA_OF_ROUTE_CHANGE
        check_route(http, method, filled(path), MAY_CHANGE if changes else MAY_READ.get(area))


def check_route(http: httpx.Client, method: str, path: str, roles: frozenset[Role] | None) -> None:
    strangers: list[tuple[Mapping[str, str], str]] = [
        ({}, MISSING),
        (bearer(new_key()[0]), WRONG),
        (bearer(EXPIRED[0]), WRONG),
    ]
    for headers, text in strangers:
        answer = http.request(method, path, headers=headers)
        assert (answer.status_code == 401) is (roles is not None), (method, path)
        if roles is not None and method != "HEAD":
            assert message_of(answer) == text
            assert answer.headers["www-authenticate"] == 'Bearer realm="sluice"'
    for role, (key, key_id, _) in KEYS.items():
        answer = answer_of(http, method, path, bearer(key))
        if roles is None or role in roles:
            assert answer.status_code not in (401, 403), (method, path, role)
        else:
            assert answer.status_code == 403, (method, path, role)
            if method != "HEAD":
                assert message_of(answer).startswith(f"the API key '{key_id}' has the role {role}")


@pytest.mark.parametrize(("area", "path"), METHODS)
@OVER_GRPC
def test_a_method_needs_a_key_with_its_role(channel: Any, area: Area, path: str) -> None:
    roles = MAY_CHANGE if path in AREA_OF_METHOD_CHANGE else MAY_READ.get(area)
    for key, text in (("", MISSING), (new_key()[0], WRONG), (EXPIRED[0], WRONG)):
        metadata = [("authorization", f"Bearer {key}")] if key else []
        found = status_of(channel, path, metadata)
        assert (found == ("UNAUTHENTICATED", text)) is (roles is not None)
    for role, (key, key_id, _) in KEYS.items():
        found = status_of(channel, path, [("x-api-key", key)])
        refused = f"the API key '{key_id}' has the role {role}"
        may = roles is None or role in roles
        assert (found[0] == "PERMISSION_DENIED" and found[1].startswith(refused)) is not may


@OVER_GRPC
def test_settings_are_read_by_observers_and_changed_by_administrators(server: Serving) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        observer, admin = ({"x-api-key": KEYS[each][0]} for each in (Role.OBSERVE, Role.ADMIN))
        before = client.get_log_settings(headers=observer, as_json=True)
        with pytest.raises(InferenceServerException, match="role observe, expected admin"):
            client.update_log_settings({"log_verbose_level": 1}, headers=observer)
        assert client.get_log_settings(headers=admin, as_json=True) == before
        client.update_log_settings({"log_verbose_level": 1}, headers=admin)
        assert client.get_log_settings(headers=observer, as_json=True) != before
        client.update_log_settings({"log_verbose_level": 0}, headers=admin)


@OVER_HTTP
@pytest.mark.own_models("loads and unloads")
def test_an_administrator_may_be_on_another_machine_but_is_no_foreign_page(
    http: httpx.Client,
) -> None:
    key = bearer(KEYS[Role.ADMIN][0])
    remote = {**key, "X-Forwarded-For": "192.0.2.1", "Host": "gateway.example"}
    assert http.post("/v2/repository/models/single/load", headers=remote).status_code == 200
    foreign = http.post("/v2/logging", headers={**key, "Origin": "http://evil.example"}, json={})
    assert (foreign.status_code, "another origin" in foreign.text) == (403, True)


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        ([("Authorization", "")], 401, MISSING),
        ([("Authorization", "Bearer")], 401, WRONG),
        ([("Authorization", "Basic dTpw")], 401, MISSING),
        ([("Authorization", "{key}")], 401, MISSING),
        ([("Authorization", "Bearer {key} x")], 401, WRONG),
        ([("Authorization", "Bearer {cut}")], 401, WRONG),
        ([("Authorization", "Bearer {key}{key}")], 401, WRONG),
        ([("Authorization", "Bearer {key},Bearer {key}")], 401, WRONG),
        ([("Authorization", "Bearer {key}")] * 2, 400, "two headers Authorization"),
        ([("Authorization", "Basic x"), ("x-api-key", "{key}")], 200, ""),
        ([("x-api-key", "{key}"), ("api-key", "{other}")], 400, "two different API keys"),
        ([("Authorization", "Bearer {key}"), ("x-api-key", "x")], 400, "two different API keys"),
        ([("Authorization", "bearer  {key} ")], 200, ""),
        ([("X-API-Key", "{key}")], 200, ""),
        ([("api-key", "{key}")], 200, ""),
        ([("Authorization", "Bearer {key}"), ("x-api-key", "{key}")], 200, ""),
        ([("x-api-key", "y" * 60_000)], 401, WRONG),
        ([("x-api-key", "y" * (1 << 20))], 431, ""),
    ],
)
@OVER_HTTP
def test_a_key_is_given_once(
    server: Serving, headers: list[tuple[str, str]], status: int, text: str
) -> None:
    key, other = KEYS[Role.INFER][0], KEYS[Role.ADMIN][0]
    lines = [
        f"{name}: {value.format(key=key, cut=key[:-1], other=other)}" for name, value in headers
    ]
    body = b'{"inputs":[{"name":"INPUT","datatype":"BYTES","shape":[1],"data":["hi"]}]}'
    with Connection(server.ports["http"]) as client:
        client.send(post(INFER, body, *lines))
        answer = client.answer()
    assert answer.status == status
    assert text.encode() in answer.body


@pytest.mark.parametrize("target", spellings(INFER).values(), ids=spellings(INFER))
@OVER_HTTP
def test_no_spelling_of_a_path_passes(server: Serving, target: str) -> None:
    with Connection(server.ports["http"]) as client:
        client.send(post(target, b"{}"))
        assert client.answer().status in (400, 401, 404, 405)


@pytest.mark.parametrize("header", ["Host: a/v2/health/live?x=", "X-Original-URL: /v2/health/live"])
@OVER_HTTP
def test_no_header_changes_the_area(server: Serving, header: str) -> None:
    asked = post(INFER, b"{}", header)
    if header.startswith("Host"):
        asked = asked.replace(b"Host: localhost\r\n", b"", 1)
    with Connection(server.ports["http"]) as client:
        client.send(asked)
        assert client.answer().status == 401


@OVER_HTTP
def test_a_request_is_refused_before_its_body_is_read(server: Serving) -> None:
    with Connection(server.ports["http"]) as client:
        client.send(post(INFER, b"x" * 100_000)[:-90_000])
        assert client.answer().status == 401


@OVER_HTTP
def test_requests_with_and_without_a_key_share_a_connection(http: httpx.Client) -> None:
    for _ in range(3):
        assert http.post(INFER, json=ECHO, headers=bearer(KEYS[Role.INFER][0])).status_code == 200
        assert http.post(INFER, json=ECHO).status_code == 401


@OVER_HTTP
def test_a_key_in_the_trailers_is_no_key(server: Serving) -> None:
    """Trailers are not merged into the headers (RFC 9110, 6.5.1)."""
    key = KEYS[Role.INFER][0]
    body = f"2\r\n{{}}\r\n0\r\nx-api-key: {key}\r\n\r\n".encode()
    for path in (INFER, "/v1/completions", "/v2/models/single/generate"):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        with Connection(server.ports["http"]) as client:
            client.send(head.encode() + body)
            assert client.answer().status == 401


@OVER_GRPC
def test_tritons_clients_pass_with_a_key(server: Serving) -> None:
    value = np.array(["hi"], np.object_)
    headers = bearer(KEYS[Role.INFER][0])
    over_http = tritonclient.http.InferenceServerClient(server.http.removeprefix("http://"))
    over_grpc = tritonclient.grpc.InferenceServerClient(server.grpc)
    with over_http:
        asked = tritonclient.http.InferInput("INPUT", [1], "BYTES")
        asked.set_data_from_numpy(value)
        answer = over_http.infer("single", [asked], headers=dict(headers))
        assert answer.as_numpy("OUTPUT") == [b"hi"]
        with pytest.raises(InferenceServerException, match="the API key is missing"):
            over_http.infer("single", [asked])
    with over_grpc:
        asked = tensor("INPUT", "BYTES", value)
        metadata = {"authorization": headers["Authorization"]}
        assert over_grpc.infer("single", [asked], headers=metadata).as_numpy("OUTPUT") == [b"hi"]
        with pytest.raises(InferenceServerException, match="the API key is missing"):
            over_grpc.infer("single", [asked])


@OVER_HTTP
def test_openais_client_passes_with_a_key(server: Serving) -> None:
    url = f"{server.http}/v1"
    with openai.OpenAI(base_url=url, api_key=KEYS[Role.INFER][0], max_retries=0) as client:
        assert client.models.list().data == []
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.models.list()
        assert refused.value.code == "invalid_api_key"
        assert refused.value.type == "invalid_request_error"
    with openai.OpenAI(base_url=url, api_key=KEYS[Role.ADMIN][0], max_retries=0) as client:
        with pytest.raises(openai.PermissionDeniedError) as forbidden:
            client.completions.create(model="single", prompt="x")
        assert forbidden.value.code == "forbidden"


@OVER_HTTP
def test_metrics_need_the_key_of_an_observer_and_count_refusals(server: Serving) -> None:
    url = f"http://127.0.0.1:{server.ports['metrics']}/metrics"

    def page(role: Role) -> httpx.Response:
        return httpx.get(url, headers=bearer(KEYS[role][0]))

    def wrong() -> float:
        sample = 'gateway_auth_failures_total{reason="wrong",wire="http"} '
        lines = [each for each in page(Role.OBSERVE).text.splitlines() if each.startswith(sample)]
        return float(lines[0].removeprefix(sample)) if lines else 0.0

    assert httpx.get(url).status_code == 401
    assert page(Role.INFER).status_code == 403
    assert "nv_inference_request_success" in page(Role.ADMIN).text
    before = wrong()
    for path in (INFER, "/v1/completions", "/v2/models/stats"):
        httpx.post(f"{server.http}{path}", headers=bearer("x"))
    assert wrong() == before + 3


@pytest.mark.parametrize("path", [INFER, "/v2/models/stats"])
@OVER_HTTP
def test_a_flood_of_wrong_keys_over_http_waits(server: Serving, path: str) -> None:
    """Requests of many connections, which are pipelined, while a client with a key is answered."""
    body = json.dumps(ECHO).encode()
    type_, wrong = "Content-Type: application/json", "x-api-key: wrong"
    with ExitStack() as connected, Connection(server.ports["http"]) as neighbour:
        clients = [
            connected.enter_context(Connection(server.ports["http"])) for _ in range(FLOOD // 4)
        ]
        began = time.monotonic()
        for each in clients:
            each.send(post(path, body, type_, wrong) * 4)
        neighbour.send(post(INFER, body, type_, f"x-api-key: {KEYS[Role.INFER][0]}"))
        assert neighbour.answer().status == 200
        assert {each.answer().status for each in clients for _ in range(4)} == {401}
    assert time.monotonic() - began >= FLOOD_SECS


@pytest.mark.parametrize("path", ["ModelInfer", "ModelStreamInfer"])
@OVER_GRPC
def test_a_flood_of_wrong_keys_over_grpc_waits(channel: Any, path: str) -> None:
    call = channel.stream_stream(f"/inference.GRPCInferenceService/{path}")
    began = time.monotonic()
    rpcs = [call(iter([b""]), metadata=[("x-api-key", "wrong")]) for _ in range(FLOOD)]
    assert {each.code() for each in rpcs} == {grpc.StatusCode.UNAUTHENTICATED}
    assert time.monotonic() - began >= FLOOD_SECS
