"""The pages at /docs, built from the routes when one of them is requested first."""

import asyncio
import re
import subprocess
import sys
from typing import Any

import fastapi_offline
import httpx
import pytest

from tests.builders import soon
from tests.gateway.frontends.http.apps import app_of
from tests.gateway.frontends.http.conftest import Open

DOCUMENTED = """
GET /admin/tenants server and models: Tenants
GET /admin/why/{request_id} administration: Why
GET /health OpenAI: Health
GET /load OpenAI: Load
GET /ping OpenAI: Health
GET /v1/models OpenAI: Models
GET /v1/models/{model} OpenAI: Model
GET /v2 server and models: Server
GET /v2/cudasharedmemory/region/{region}/status shared memory: Cuda Status
GET /v2/cudasharedmemory/status shared memory: Cuda Status
GET /v2/fleet server and models: Fleet
GET /v2/health/live server and models: Live
GET /v2/health/ready server and models: Ready
GET /v2/logging log: Show
GET /v2/memory server and models: Memory
GET /v2/models/stats server and models: All Statistics
GET /v2/models/{model} server and models: Metadata
GET /v2/models/{model}/config server and models: Config
GET /v2/models/{model}/ready server and models: Model Ready
GET /v2/models/{model}/rollout rollouts: Rollout
GET /v2/models/{model}/rollout/history rollouts: History
GET /v2/models/{model}/stats server and models: Statistics
GET /v2/models/{model}/trace/setting traces: Show
GET /v2/models/{model}/versions/{version} server and models: Metadata
GET /v2/models/{model}/versions/{version}/config server and models: Config
GET /v2/models/{model}/versions/{version}/ready server and models: Model Ready
GET /v2/models/{model}/versions/{version}/stats server and models: Statistics
GET /v2/repository/models/{model}/labels repository: Labels
GET /v2/rollouts rollouts: Rollouts
GET /v2/rollouts/events rollouts: Events
GET /v2/systemsharedmemory/region/{region}/status shared memory: System Status
GET /v2/systemsharedmemory/status shared memory: System Status
GET /v2/trace/setting traces: Show
GET /version OpenAI: Version
POST /detokenize OpenAI: Detokenize
POST /ping OpenAI: Health
POST /tokenize OpenAI: Tokenize
POST /v1/chat/completions OpenAI: Chat/Completions
POST /v1/completions OpenAI: Completions
POST /v1/embeddings OpenAI: Embeddings
POST /v1/rerank OpenAI: Rerank
POST /v1/responses OpenAI: Responses
POST /v1/score OpenAI: Score
POST /v2/cudasharedmemory/region/{region}/register shared memory: Register Cuda
POST /v2/cudasharedmemory/region/{region}/unregister shared memory: Unregister Cuda
POST /v2/cudasharedmemory/register shared memory: Register Cuda
POST /v2/cudasharedmemory/unregister shared memory: Unregister Cuda
POST /v2/logging log: Change
POST /v2/models/{model}/record repository: Record
POST /v2/models/{model}/requests/{request_id}/cancel server and models: Cancel
POST /v2/models/{model}/rollout/abort rollouts: Abort
POST /v2/models/{model}/rollout/pause rollouts: Pause
POST /v2/models/{model}/rollout/promote rollouts: Promote
POST /v2/models/{model}/rollout/resume rollouts: Resume
POST /v2/models/{model}/rollout/start rollouts: Start
POST /v2/models/{model}/rollout/weight rollouts: Weight
POST /v2/models/{model}/trace/setting traces: Change
POST /v2/models/{model}/versions/{version}/record repository: Record
POST /v2/models/{model}/versions/{version}/requests/{request_id}/cancel server and models: Cancel
POST /v2/repository/index repository: Index
POST /v2/repository/models/{model}/labels repository: Label
POST /v2/repository/models/{model}/load repository: Load
POST /v2/repository/models/{model}/unload repository: Unload
POST /v2/repository/{repository}/index repository: Index
POST /v2/repository/{repository}/models/{model}/load repository: Refuse Repository
POST /v2/repository/{repository}/models/{model}/unload repository: Refuse Repository
POST /v2/systemsharedmemory/region/{region}/register shared memory: Register System
POST /v2/systemsharedmemory/region/{region}/unregister shared memory: Unregister System
POST /v2/systemsharedmemory/register shared memory: Register System
POST /v2/systemsharedmemory/unregister shared memory: Unregister System
POST /v2/trace/setting traces: Change
"""

START = """
import asyncio, sys
import gateway.processes.frontend
from gateway.backend_loader import BackendLoader
from gateway.listeners import BoundListeners
from gateway.server import Server
from gateway.settings import GrpcSettings, HttpSettings, MetricsSettings, Settings

async def build():
    ports = HttpSettings(port=0), GrpcSettings(port=0), MetricsSettings(port=0)
    BoundListeners(Server(Settings(**dict(zip(("http", "grpc", "metrics"), ports)))))

asyncio.run(build())
BackendLoader().get("identity")
print(*sys.modules)
"""
"""A program with a frontend process, a server and a backend, which prints its modules."""

UNNEEDED = {
    *("difflib", "importlib.metadata", "importlib.resources", "zipfile"),
    *("fastapi", "fastapi_offline", "prometheus_client", "pydantic", "pydantic_core"),
    *("gateway.processes.listeners", "gateway.processes.supervisor"),
    *("gateway.schedulers.dynamic", "gateway.sequences.scheduler"),
}


ASK = """
import asyncio, sys
from gateway.frontends.http.documentation import Documentation

async def nothing(message=None):
    pass

scope = {"type": "http", "method": "GET", "path": "/openapi.json", "headers": []}
asyncio.run(Documentation({}, {})(scope, nothing, nothing))
print(*sys.modules)
"""
"""The modules after the first request for a page, without one for a static file."""


@pytest.fixture
def client(connect: Open) -> httpx.AsyncClient:
    return connect(app_of())


async def operations(client: httpx.AsyncClient) -> dict[tuple[str, str], Any]:
    """OpenAPI's operation objects by method and path."""
    document = (await soon(client.get("/openapi.json"))).json()
    return {
        (method.upper(), path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


async def test_every_route_of_the_control_endpoints_is_documented(
    client: httpx.AsyncClient,
) -> None:
    found = (await operations(client)).items()
    assert DOCUMENTED.strip().splitlines() == sorted(
        f"{method} {path} {', '.join(each['tags'])}: {each['summary']}"
        for (method, path), each in found
    )
    assert all(each["description"] for _, each in found)


async def test_the_parameters_in_a_path_are_documented(client: httpx.AsyncClient) -> None:
    for (_, path), operation in (await operations(client)).items():
        named = [(each["in"], each["name"]) for each in operation.get("parameters", ())]
        assert named == [("path", name) for name in re.findall(r"{(\w+)}", path)]


async def test_endpoints_of_openai_are_documented_with_a_body(client: httpx.AsyncClient) -> None:
    found = await operations(client)
    body = found["POST", "/v1/chat/completions"]["requestBody"]
    assert (body["required"], list(body["content"])) == (True, ["application/json"])


async def test_concurrent_requests_share_one_build(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    build = fastapi_offline.FastAPIOffline

    def counted(**options: Any) -> object:
        built.append(options)
        return build(**options)

    monkeypatch.setattr(fastapi_offline, "FastAPIOffline", counted)
    pages = ("/docs", "/redoc", "/openapi.json", "/docs")
    answers = await soon(asyncio.gather(*map(client.get, pages)))
    assert [each.status_code for each in answers] == [200] * len(pages)
    assert len(built) == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "/static-offline-docs/nope", 404, "Not Found"),
        ("GET", "/docs/", 404, "Not Found"),
        ("POST", "/docs", 405, "Method Not Allowed"),
        ("HEAD", "/docs", 405, ""),
        ("DELETE", "/openapi.json", 405, "Method Not Allowed"),
    ],
)
async def test_an_error_of_the_pages_is_the_servers(
    client: httpx.AsyncClient, method: str, path: str, status: int, error: str
) -> None:
    answer = await soon(client.request(method, path))
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.text == (f'{{"error":"{error}"}}' if error else "")
    assert ("allow" in answer.headers) == (status == 405)


def test_a_server_starts_without_modules_that_few_requests_need() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, check=False
    )
    loaded = set(ended.stdout.split())
    assert {"starlette.applications", "backends.identity"} <= loaded, ended.stderr
    assert loaded.isdisjoint(UNNEEDED)


def test_static_files_import_nothing_on_the_event_loop() -> None:
    ended = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    assert "anyio._backends._asyncio" in ended.stdout.split(), ended.stderr
