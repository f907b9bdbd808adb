"""Traces of one request in the files of its router and its replica."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.dataplane import DataPlane
from gateway.settings import TraceSettings
from gateway.span_settings import SpanSettings
from tests.builders import soon, text_request
from tests.collector import collector
from tests.conformance.models import identity
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.in_one_loop import pair
from tests.serving import write_model

TEXT = identity("BYTES", "1").replace("INPUT", "text_input").replace("OUTPUT", "text_output")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the repositories `models` and `nothing`."""
    write_model(tmp_path / "models", "text", TEXT)
    (tmp_path / "nothing").mkdir()
    return tmp_path


def traced(file: Path, rate: int) -> dict[str, Any]:
    return {"trace": TraceSettings(file=str(file), levels=("TIMESTAMPS",), rate=rate)}


async def ask(router: DataPlane, replica: DataPlane) -> None:
    """A request, with a trace if it is sampled."""
    trace = router.tracer.begin("text")
    with router.infer(text_request(id="7"), trace=trace) as stream:
        await soon(stream.only())
    if trace is not None:
        trace.sent()
    await until(lambda: not replica.in_flight)


def members(file: Path, name: str) -> list[Any]:
    """The values of a member, in the objects that have it."""
    found = json.loads(file.read_text()) if file.exists() else []
    return [each[name] for each in found if name in each]


def stamps(file: Path) -> list[str]:
    return [each[0]["name"] for each in members(file, "timestamps")]


async def test_a_trace_of_a_router_is_the_parent_of_that_of_its_replica(folder: Path) -> None:
    here, there = folder / "router.json", folder / "replica.json"
    servers = pair(
        *(folder / "models", folder / "nothing", traced(here, rate=2), traced(there, rate=1000))
    )
    async with servers as (router, replica):
        (row,) = router.fleet.describe()["replicas"] if router.fleet else ()
        for _ in range(4):
            await ask(router, replica)
    assert members(here, "replica") == [row["address"]] * 2
    parents = members(here, "traceparent")
    assert len(set(parents)) == 2
    assert members(there, "traceparent") == parents
    assert members(there, "request_id") == ["7", "7"]
    assert members(here, "ns") == sorted(members(here, "ns"))
    begin, end = stamps(there)[:2], stamps(there)[-2:]
    assert begin == ["FLEET_RECV_START", "FLEET_RECV_END"]
    assert sorted(end) == ["FLEET_SEND_END", "REQUEST_END"]


async def test_a_replica_traces_requests_of_a_router_without_traces_at_its_own_rate(
    folder: Path,
) -> None:
    there = folder / "replica.json"
    servers = pair(folder / "models", folder / "nothing", of_replica=traced(there, rate=3))
    async with servers as (router, replica):
        for _ in range(7):
            await ask(router, replica)
    assert len(members(there, "request_id")) == 2
    assert members(there, "traceparent") == []


async def test_a_replica_continues_the_trace_of_its_router_in_spans(folder: Path) -> None:
    with collector() as found:
        spans = SpanSettings(url=found.url, bsp_schedule_delay=10)
        here, there = (TraceSettings(levels=("TIMESTAMPS",), rate=r, spans=spans) for r in (1, 0))
        repositories = folder / "models", folder / "nothing"
        async with pair(*repositories, {"trace": here}, {"trace": there}) as servers:
            await ask(*servers)
    assert len({each.trace_id for each in found.spans}) == 1
    by_id = {each.span_id: each.name for each in found.spans}
    parents = sorted((each.name, by_id.get(each.parent_span_id, "")) for each in found.spans)
    assert parents == [
        *(("InferRequest", ""), ("InferRequest", "replica")),
        *(("compute", "text"), ("compute", "text"), ("replica", "text")),
        *(("text", "InferRequest"), ("text", "InferRequest")),
    ]


async def test_a_replica_without_traces_answers_a_traced_request(folder: Path) -> None:
    here = folder / "router.json"
    async with pair(folder / "models", folder / "nothing", traced(here, rate=1)) as servers:
        await ask(*servers)
    assert len(members(here, "replica")) == 1
