"""The HTTP application over a real data plane: routes, errors and statuses."""

import re
from dataclasses import replace

import httpx
import pytest

from gateway.admission.admission import Admission
from gateway.dataplane import DataPlane
from gateway.frontends.http.app import build_app
from gateway.models.model import Model
from gateway.policy.caller import Caller
from gateway.policy.tenants import TenantRules, Tenants
from tests.builders import (
    TEXT,
    LoadedModels,
    ScriptedInstance,
    settle,
    soon,
    text_request,
)
from tests.conftest import Serve
from tests.gateway.ensembles.chains import chain
from tests.gateway.frontends.http.apps import ASK, SETTINGS, app_of, generate, identity
from tests.gateway.frontends.http.conftest import Open

TENANTS = "http://localhost/admin/tenants"


@pytest.fixture
async def text(serve: Serve, connect: Open) -> httpx.AsyncClient:
    """A client of a server with the model `text`, which echoes."""
    return connect(app_of(serve(identity())))


# Paths and methods.


@pytest.mark.parametrize(
    "path",
    [
        "/nope",
        "/v2/",
        "/v2/models/text/generate/",
        "/v2/models/text/versions/abc/generate",
        "/v2/models/text/versions//generate",
        "/v2/models/a/b/generate",
        "/V2",
    ],
)
async def test_a_path_without_a_route_is_not_found(text: httpx.AsyncClient, path: str) -> None:
    answer = await soon(text.post(path, json=ASK))
    assert (answer.status_code, answer.text) == (404, '{"error":"Not Found"}')
    assert answer.headers["content-type"] == "application/json"


async def test_a_version_is_a_number(text: httpx.AsyncClient) -> None:
    answer = await soon(text.get("/v2/models/text/versions/abc"))
    assert (answer.status_code, answer.text) == (404, '{"error":"Not Found"}')


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models/text/generate"),
        ("PUT", "/v2/models/text/generate"),
        ("DELETE", "/v2/models/text/generate_stream"),
        ("GET", "/v2/models/text/versions/1/generate_stream"),
        ("POST", "/v2"),
        ("POST", "/v2/health/live"),
        ("OPTIONS", "/v2/health/ready"),
        ("DELETE", "/v2/models/text"),
        ("POST", "/v2/models/text/config"),
        ("POST", "/v2/models/stats"),
    ],
)
async def test_another_method_is_not_allowed(
    text: httpx.AsyncClient, method: str, path: str
) -> None:
    answer = await soon(text.request(method, path))
    assert (answer.status_code, answer.text) == (405, '{"error":"Method Not Allowed"}')
    assert ("POST" if "generate" in path else "GET") in answer.headers["allow"].split(", ")


async def test_head_is_not_allowed_either(text: httpx.AsyncClient) -> None:
    assert (await soon(text.head("/v2/health/live"))).status_code == 405


async def test_the_management_routes_are_documented(text: httpx.AsyncClient) -> None:
    paths = (await soon(text.get("/openapi.json"))).json()["paths"]
    assert {"/v2", "/v2/health/ready", "/v2/models/{model}/config"} <= set(paths)


async def test_the_page_of_the_routes_needs_no_other_server(text: httpx.AsyncClient) -> None:
    page = await soon(text.get("/docs"))
    needed = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(needed) >= 3
    for address in needed:
        found = await soon(text.get(address))
        assert (found.status_code, found.content[:1] != b"") == (200, True), address


# Refusals.


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (
            "nope/",
            b"{}",
            404,
            "Request for unknown model: 'nope' is not found",
        ),
        (
            "text/",
            b"",
            500,
            "failed to parse the request JSON buffer: The document is empty. at 0",
        ),
        (
            "text/",
            b'{"text_input": 5}',
            500,
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
        ),
        (
            "text/",
            b'{"id": "r1"}',
            400,
            "[request id: r1] expected 1 inputs but got 0 inputs for model 'text'. Got input(s) "
            "[], but missing required input(s) ['text_input']. Please provide all required "
            "input(s).",
        ),
        (
            "text/",
            b'{"text_input": "hi", "stop": null}',
            400,
            "parameter 'stop' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            "text/",
            b'{"text_input": "%b"}' % (b"x" * 1000),
            400,
            "request JSON size of 1018 bytes exceeds the maximum allowed input size of 1000 "
            "bytes. Use --http-max-input-size to increase the limit.",
        ),
    ],
    ids=["model", "empty body", "wrong kind", "missing input", "parameter", "too large"],
)
async def test_a_refusal_is_plain_json_with_its_status(
    text: httpx.AsyncClient, verb: str, path: str, body: bytes, status: int, message: str
) -> None:
    answer = await soon(text.post(f"/v2/models/{path}{verb}", content=body))
    assert (answer.status_code, answer.json()) == (status, {"error": message})
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.content)


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
async def test_a_compressed_body_is_refused(text: httpx.AsyncClient, verb: str) -> None:
    answer = await soon(
        text.post(f"/v2/models/text/{verb}", json=ASK, headers={"content-encoding": "gzip"})
    )
    assert answer.status_code == 400
    assert answer.json() == {"error": "Unsupported content-encoding, only 'identity' is supported."}


@pytest.mark.parametrize("encoding", ["identity", ""])
async def test_identity_is_no_compression(text: httpx.AsyncClient, encoding: str) -> None:
    headers = {"content-encoding": encoding}
    answer = await soon(text.post("/v2/models/text/generate", json=ASK, headers=headers))
    assert answer.status_code == 200


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
async def test_a_full_model_asks_to_try_again(serve: Serve, connect: Open, verb: str) -> None:
    config = replace(TEXT, parameters={"max_in_flight": "1"})
    instance = ScriptedInstance()
    model = serve(instance, config=config)
    app = app_of(model)
    async with generate(app, "text", "generate_stream"):
        await instance.begun()
        answer = await soon(connect(app).post(f"/v2/models/text/{verb}", json=ASK))
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "1 requests in flight" in answer.json()["error"]


async def test_an_exiting_server_refuses_requests_and_probes(serve: Serve, connect: Open) -> None:
    dataplane = DataPlane(LoadedModels(serve(identity())))  # type: ignore[arg-type]
    client = connect(build_app(dataplane, SETTINGS, "triton"))
    dataplane.refuse_requests()
    for request in (
        client.post("/v2/models/text/generate", json=ASK),
        client.get("/v2/health/live"),
        client.get("/v2/health/ready"),
    ):
        answer = await soon(request)
        assert (answer.status_code, answer.json()) == (503, {"error": "Server exiting"})


class BrokenModels(LoadedModels):
    """Models that cannot be looked up because of a defect."""

    def find(self, name: str, version: str) -> Model:
        raise RuntimeError("/secret/path")


async def test_a_defect_of_the_server_is_not_shown_to_the_client(connect: Open) -> None:
    client = connect(build_app(DataPlane(BrokenModels()), SETTINGS, "triton"))  # type: ignore[arg-type]
    answer = await soon(client.post("/v2/models/text/generate", json=ASK))
    assert answer.status_code == 500
    assert answer.json()["error"]
    assert "secret" not in answer.text


# Tenants.


async def test_the_request_of_an_ensemble_is_one_in_flight_of_a_tenant_without_limits(
    serve: Serve, connect: Open
) -> None:
    ensemble = chain(serve)
    dataplane = DataPlane(LoadedModels(ensemble.model, *ensemble.models.values()))  # type: ignore[arg-type]
    client = connect(build_app(dataplane, SETTINGS, "id"))
    assert (await soon(client.get(TENANTS))).json() == {"tenants": []}
    dataplane.admission = Admission(Tenants({"a": TenantRules(weight=2.0)}))
    with dataplane.infer(text_request(model="e", caller=Caller(tenant="a"))):
        await ensemble["a"].begun()
        (found,) = (await soon(client.get(TENANTS))).json()["tenants"]
        assert (found["tenant"], found["in_flight"]) == ("a", 1)
    await settle()
