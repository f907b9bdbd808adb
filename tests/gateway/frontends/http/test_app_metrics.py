"""The metrics page: its values are those of the moment of the request."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from gateway.dataplane import DataPlane
from gateway.frontends.http.app import build_metrics_app
from gateway.metrics_page import MetricsPage, access_reading
from gateway.models.model import Model
from gateway.observability.access_log import AccessLog
from gateway.observability.statistics import CacheReading
from gateway.policy.audit import AuditLog
from gateway.policy.watched_file import ReloadFailures
from gateway.settings import MetricsSettings
from tests.builders import TEXT, LoadedModels, ScriptedInstance, read_all, soon, text_request
from tests.conftest import Serve

PLAIN = MetricsSettings(cpu=False, gpu=False)


def page_of(*models: Model) -> Starlette:
    """The application with the page of these models."""
    return build_metrics_app(MetricsPage(DataPlane(LoadedModels(*models)), PLAIN))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
async def test_the_page_shows_every_model_as_it_is_now(serve: Serve, path: str) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    app = page_of(model)
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
    app = page_of()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        refused = await soon(client.post("/metrics"))
        assert (refused.status_code, refused.text) == (405, '{"error":"Method Not Allowed"}')
        assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize("path", ["/", "/other", "/metrics/other"])
async def test_every_other_page_is_empty(path: str) -> None:
    app = page_of()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        empty = await soon(client.get(path))
        assert (empty.status_code, empty.content) == (200, b"")
        assert (await soon(client.put(path))).status_code == 405


async def test_the_page_shows_the_machine_and_the_cache() -> None:
    page = MetricsPage(
        DataPlane(LoadedModels()),  # type: ignore[arg-type]
        MetricsSettings(gpu=False),
        lambda: CacheReading(entries=7),
    )
    app = build_metrics_app(page)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        found = (await soon(client.get("/metrics"))).text.splitlines()
    assert "nv_cache_num_entries 7" in found
    assert "nv_pinned_memory_pool_total_bytes 0" in found
    assert [line for line in found if line.startswith("nv_cpu_memory_total_bytes ")]


async def test_tags_of_a_config_are_labels(serve: Serve) -> None:
    model = serve(ScriptedInstance(), config=replace(TEXT, metric_tags={"team": "search"}))
    app = page_of(model)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        found = (await soon(client.get("/metrics"))).text.splitlines()
    assert 'nv_inference_count{_team="search",model="text",version="1"} 0' in found


async def test_a_tag_that_is_not_a_label_keeps_the_page_valid(serve: Serve) -> None:
    tags = {"cost center": 'a "b"\n', "équipe-1": "x"}
    model = serve(ScriptedInstance(), config=replace(TEXT, metric_tags=tags))
    app = page_of(model)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        page = (await soon(client.get("/metrics"))).text
    found = {family.name: family for family in text_string_to_metric_families(page)}
    [sample] = found["nv_inference_count"].samples
    assert sample.labels["_cost_center"] == 'a "b"\n'
    assert sample.labels["_quipe_1"] == "x"


async def test_the_page_shows_refused_files_and_the_audit_log(tmp_path: Path) -> None:
    """That of the server inside a program, which has no ports, shows the audit log."""
    audit, refused = AuditLog(tmp_path / "audit"), Refused()
    log = AccessLog(tmp_path / "access")
    dataplane = DataPlane(LoadedModels(), audit=audit, access_log=log)  # type: ignore[arg-type]
    access = partial(access_reading, dataplane, None, [refused, refused])  # type: ignore[list-item]
    settings = MetricsSettings(gpu=False)
    inside = await MetricsPage(dataplane, settings).render()
    page = await MetricsPage(dataplane, settings, access=access).render()
    assert b"\ngateway_audit_failures_total 0\n" in inside
    assert b"\ngateway_certificates_reload_failures_total " not in inside
    assert b"\ngateway_audit_failures_total 0\n" in page
    assert b"\ngateway_access_log_dropped_total 0\n" in page
    assert b"\ngateway_certificates_reload_failures_total 2\n" in page


class Refused:
    """Certificates that were refused once."""

    def __init__(self) -> None:
        self.failures = ReloadFailures("refused")
        self.failures.note(OSError("x"))
