"""Pages in browsers: origins that may read, bodies that need a preflight, names of the server."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

from gateway.policy.areas import AREA_OF_ROUTE_CHANGE, HTTP, Area
from gateway.policy.control import CONTROLLED
from gateway.policy.keys import Role, new_key
from tests.conformance.keys import ECHO, INFER, bearer, message_of, stored, write
from tests.conformance.spellings import filled
from tests.raw import Connection, post
from tests.serving import WAIT_SECS, Serving, serving

pytestmark = pytest.mark.runs_on("frontends")
APP, EVIL = "https://app.example", "https://evil.example"
FLAGS = (
    *("--model-control-mode=explicit", "--load-model=single", "--load-model=repeat"),
    *("--load-model=echo_fp32", f"--cors-origin={APP}", "--allowed-hosts=gateway.example"),
)
PATHS = [path for area, paths in HTTP.items() if area is not Area.METRICS for path in paths]
READ_BY_POST = {*HTTP[Area.INFERENCE], "/v2/repository/index", "/ping"}
STREAM = "/v2/models/repeat/generate_stream"
IN_FLIGHT = "gateway_requests_in_flight"
ALLOW = "access-control-allow-origin"
PREFLIGHT = {
    "Origin": APP,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
KEYS = {role: new_key() for role in (Role.INFER, Role.ADMIN)}


@pytest.fixture(scope="module")
def keyed(
    repository: Path, server_kind: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a server with API keys, and the same pages."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(file, *(stored(made, roles=frozenset({role})) for role, made in KEYS.items()))
    flags = (*FLAGS[:2], f"--api-keys={file}", f"--cors-origin={APP}")
    with serving(repository, *flags) as started, httpx.Client(base_url=started.http) as client:
        yield client
    assert started.process.returncode == 0


def page(origin: str = EVIL, kind: str = "application/json") -> dict[str, str]:
    return {"Origin": origin, **({"Content-Type": kind} if kind else {})}


def test_no_route_takes_the_post_of_another_origins_page_without_a_preflight(
    http: httpx.Client,
) -> None:
    for route in PATHS:
        path = filled(route.replace("{version}", "1"))
        answer = http.post(path, content=b"{}", headers=page(EVIL, "text/plain"))
        if route in AREA_OF_ROUTE_CHANGE or route in HTTP[Area.ADMIN]:
            assert answer.status_code == 403, path
            what = (
                "changes are" if route in AREA_OF_ROUTE_CHANGE else f"{CONTROLLED[Area.ADMIN]} is"
            )
            assert message_of(answer).startswith(f"{what} not answered to pages")
        elif answer.status_code != 405 or route in READ_BY_POST:
            assert answer.status_code == 415, path
            assert f"Origin '{EVIL}'" in message_of(answer)
            assert http.post(path, content=b"{", headers=page(EVIL)).status_code != 415


@pytest.mark.parametrize("path", ["/v2/models/repeat/generate", INFER, "/v1/chat/completions"])
def test_a_page_of_a_named_origin_needs_one_and_a_program_none(
    http: httpx.Client, path: str
) -> None:
    own = page(str(http.base_url).rstrip("/"), "text/plain")
    for headers in (page(APP, "text/plain"), page(APP, ""), page("null", "")):
        assert http.post(path, content=b"{}", headers=headers).status_code == 415
    for headers in ({"Content-Type": "text/plain"}, own, page(APP)):
        assert http.post(path, content=b"{}", headers=headers).status_code != 415


def test_a_cancellation_by_a_page_needs_a_type_without_a_body(http: httpx.Client) -> None:
    path = "/v2/models/single/requests/x/cancel"
    assert http.post(path, headers=page(EVIL, "")).status_code == 415
    assert http.post(path, headers=page(EVIL)).status_code == http.post(path).status_code == 404


def test_no_page_reads_the_metrics(server: Serving) -> None:
    url = f"http://127.0.0.1:{server.ports['metrics']}/metrics"
    answer = httpx.get(url, headers={"Origin": APP}, timeout=WAIT_SECS)
    assert (answer.status_code, answer.headers.get(ALLOW)) == (200, None)


def test_a_program_and_a_page_share_a_connection(server: Serving) -> None:
    """The head of a request that is known from the last one is not that of a page."""
    asked = b'{"inputs":[{"name":"INPUT","datatype":"BYTES","shape":[1],"data":["hi"]}]}'
    json = "Content-Type: application/json"
    with Connection(server.ports["http"]) as client:
        for origin, allowed in ((None, None), (APP, APP), (None, None), (EVIL, None), (APP, APP)):
            for _ in range(2):
                more = [] if origin is None else [f"Origin: {origin}"]
                client.send(post(INFER, asked, json, *more))
                answer = client.answer()
                assert (answer.status, answer.headers.get(ALLOW)) == (200, allowed)
                assert answer.json["outputs"][0]["data"] == ["hi"]
                assert origin == EVIL or answer.headers.get("vary") == (allowed and "Origin")


def test_a_page_sends_and_reads_binary_tensors(http: httpx.Client) -> None:
    value = struct.pack("<2f", 1.5, 2.5)
    tensor = '"name":"INPUT","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}'
    head = f'{{"inputs":[{{{tensor}}}],"parameters":{{"binary_data_output":true}}}}'.encode()
    length = {"Inference-Header-Content-Length": str(len(head))}
    headers = {**page(APP, "application/octet-stream"), **length}
    answer = http.post("/v2/models/echo_fp32/infer", content=head + value, headers=headers)
    assert answer.content.endswith(value)
    exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
    assert exposed[0] == "x-request-id"
    assert "inference-header-content-length" in exposed


def test_events_reach_a_page_at_once_and_its_disconnect_stops_the_model(server: Serving) -> None:
    asked = {"text_input": "x", "n": 100_000, "delay_us": 20_000}
    with Connection(server.ports["http"]) as client:
        client.ask(STREAM, asked, f"Origin: {APP}")
        head = client.head()
        assert (head.status, head.headers[ALLOW]) == (200, APP)
        assert b'"x"' in client.chunk()
        assert b'"x"' in client.chunk()
        assert server.metric(IN_FLIGHT, "repeat") == 1
    server.wait_metric(IN_FLIGHT, "repeat", 0)


def test_a_page_of_a_named_origin_changes_nothing(keyed: httpx.Client, http: httpx.Client) -> None:
    path = "/v2/repository/models/single/unload"
    admin = bearer(KEYS[Role.ADMIN][0])
    for client, more in ((http, {}), (keyed, admin)):
        answer = client.post(path, json={}, headers={**page(APP), **more})
        assert (answer.status_code, answer.headers[ALLOW]) == (403, APP)
        assert message_of(answer).startswith("changes are not answered to pages of another origin")


@pytest.mark.parametrize("path", [INFER, "/v1/chat/completions", "/v2/logging", "/nothing"])
def test_a_preflight_needs_no_key_and_what_follows_needs_one(
    keyed: httpx.Client, path: str
) -> None:
    key = bearer(KEYS[Role.INFER][0])
    for more in ({}, key, bearer("wrong")):
        answer = keyed.options(path, headers={**PREFLIGHT, **more})
        assert (answer.status_code, answer.headers[ALLOW]) == (200, APP)
        assert keyed.options(path, headers={**PREFLIGHT, **more, "Origin": EVIL}).is_error
    if path != "/nothing":
        for wrong in ({}, bearer("wrong")):
            refused = keyed.post(path, json=ECHO, headers={**page(APP), **wrong})
            assert (refused.status_code, refused.headers[ALLOW]) == (401, APP)
            without = {name: value for name, value in PREFLIGHT.items() if name != "Origin"}
            assert keyed.options(path, headers={**without, **wrong}).status_code in (401, 405)
    if path == INFER:
        answer = keyed.post(path, json=ECHO, headers={**page(APP), **key})
        assert (answer.status_code, answer.headers[ALLOW]) == (200, APP)


def test_the_page_of_the_server_learns_the_roles_of_its_key(
    keyed: httpx.Client, http: httpx.Client
) -> None:
    for path, client, role in (("models", keyed, Role.INFER), ("state", keyed, Role.ADMIN)):
        found = client.get(f"/playground/{path}", headers=bearer(KEYS[role][0])).json()
        assert found["roles"] == [role]
        assert http.get(f"/playground/{path}").json()["roles"] is None
    models = keyed.get("/playground/models", headers=bearer(KEYS[Role.INFER][0])).json()["models"]
    assert [(each["name"], each["kind"]) for each in models] == [("single", "tensor")]


ODD: Sequence[tuple[Sequence[str], int]] = (
    (["null"], 200),
    ([f"{APP}/"], 200),
    ([f"{APP}/path?query"], 200),
    ([APP.upper()], 200),
    (["", ""], 200),
    ([EVIL, APP], 200),
    (["x" * 60_000], 200),
    (["x" * (64 << 10)], 431),
)


@pytest.mark.parametrize(("origins", "status"), ODD)
def test_an_odd_origin_may_not_read(server: Serving, origins: Sequence[str], status: int) -> None:
    more = [f"Origin: {each}" for each in origins]
    with Connection(server.ports["http"]) as client:
        client.ask(INFER, ECHO, *more)
        answer = client.answer()
        assert (answer.status, answer.headers.get(ALLOW)) == (status, None)


def named(name: str, port: int) -> Mapping[str, str]:
    """The headers of a page that is at a name with the port of the server."""
    host = f"{name}:{port}"
    return {"Host": host, **page(f"http://{host}")}


READING = {
    INFER: ECHO,
    "/v2/models/repeat/generate": {"text_input": "x"},
    "/v1/chat/completions": {"model": "single"},
    "/v2/repository/index": {},
}


@pytest.mark.parametrize("path", READING)
def test_a_page_that_bound_its_name_to_this_machine_may_not_post(
    server: Serving, http: httpx.Client, path: str
) -> None:
    """DNS rebinding: for its browser the page is of this server."""
    port = server.ports["http"]
    refused = http.post(path, json=READING[path], headers=named("evil.example", port))
    assert refused.status_code == 403
    assert f"found Host 'evil.example:{port}'; --allowed-hosts" in message_of(refused)
    for name in ("gateway.example", "localhost", "app.localhost", "gateway", "10.0.0.5"):
        assert http.post(path, json=READING[path], headers=named(name, port)).status_code != 403
    proxy = {"Host": "llm.example", **page("https://llm.example")}
    assert http.post(path, json=READING[path], headers=proxy).status_code != 403
    assert http.get("/v2", headers=named("evil.example", port)).status_code == 200


def test_with_a_key_the_name_is_not_looked_at(keyed: httpx.Client) -> None:
    headers = {**named("evil.example", keyed.base_url.port or 0), **bearer(KEYS[Role.INFER][0])}
    assert keyed.post(INFER, json=ECHO, headers=headers).status_code == 200
