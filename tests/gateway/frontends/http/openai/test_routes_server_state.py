"""Health, version and load, as at `vllm serve`."""

import pytest

from gateway import __version__
from gateway.dataplane import DataPlane
from gateway.frontends.http.app import build_app
from tests.builders import LoadedModels, ScriptedInstance, soon
from tests.conftest import Serve
from tests.exchange import Exchange
from tests.gateway.frontends.http.conftest import Open
from tests.gateway.frontends.http.openai.conftest import CHAT, SETTINGS, app_of, body, chunk


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
)
async def test_health_is_the_readiness_of_the_server(
    serve: Serve, connect: Open, method: str, path: str
) -> None:
    models = LoadedModels(serve(ScriptedInstance()))
    dataplane = DataPlane(models)  # type: ignore[arg-type] # stands in for the registry
    client = connect(build_app(dataplane, SETTINGS, "triton"))
    found = await soon(client.request(method, path))
    assert (found.status_code, found.content) == (200, b"")
    models.trouble = {"bad": "Internal: broken weights"}
    found = await soon(client.request(method, path))
    assert (found.status_code, found.content) == (503, b"")
    models.trouble = {}
    dataplane.refuse_requests()
    assert (await soon(client.request(method, path))).status_code == 503


async def test_the_version_is_this_servers(connect: Open) -> None:
    found = await soon(connect(app_of()).get("/version"))
    assert (found.status_code, found.json()) == (200, {"version": __version__})


async def test_the_load_is_the_number_of_requests_in_flight(serve: Serve, connect: Open) -> None:
    instance, other = ScriptedInstance(), ScriptedInstance()
    app = app_of(serve(instance, config=CHAT), serve(other))
    client = connect(app)

    async def load() -> object:
        return (await soon(client.get("/load"))).json()

    assert await load() == {"server_load": 0}
    async with Exchange(app, "/v1/chat/completions", body(model="chat")) as exchange:
        execution = await instance.begun()
        async with Exchange(app, "/v2/models/text/generate", body(text_input="x")):
            await other.begun()
            assert await load() == {"server_load": 1}
        execution.answer(chunk("{}", final=True))
        execution.end()
        assert (await exchange.start())[0] == 200
        assert await exchange.rest() == b"{}"
    assert await load() == {"server_load": 0}


@pytest.mark.parametrize("path", ["/health", "/version", "/load"])
async def test_only_get_is_allowed(connect: Open, path: str) -> None:
    found = await soon(connect(app_of()).post(path, content=b"{}"))
    assert (found.status_code, found.headers["allow"]) == (405, "GET")
