"""The metrics page: what is shown is what is so when it is asked for."""

import httpx
import pytest

from gateway.dataplane import DataPlane
from gateway.frontends.http.metrics import build_metrics_app
from tests.builders import LoadedModels, ScriptedInstance, read_all, soon, text_request
from tests.conftest import Serve


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
async def test_the_page_shows_every_model_as_it_is_now(serve: Serve, path: str) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    app = build_metrics_app(DataPlane(LoadedModels(model)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        with model.submit(text_request()) as stream:
            execution = await instance.begun()
            page = await soon(client.get(path))
            assert page.status_code == 200
            assert page.headers["content-type"] == "text/plain; charset=utf-8"
            lines = page.text.splitlines()
            assert 'gateway_requests_in_flight{model="text",version="1"} 1' in lines
            assert 'nv_inference_request_success{model="text",version="1"} 0' in lines
            execution.finish("done")
            await soon(read_all(stream))
        lines = (await soon(client.get(path))).text.splitlines()
    assert 'gateway_requests_in_flight{model="text",version="1"} 0' in lines
    assert 'nv_inference_request_success{model="text",version="1"} 1' in lines
    assert 'gateway_model_ready{model="text",version="1"} 1' in lines


async def test_the_page_is_only_read() -> None:
    app = build_metrics_app(DataPlane(LoadedModels()))  # type: ignore[arg-type]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        assert (await soon(client.post("/metrics"))).status_code == 405
        empty = await soon(client.get("/metrics"))
        assert (empty.status_code, empty.content) == (200, b"")
