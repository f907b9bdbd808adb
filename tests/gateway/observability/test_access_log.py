"""The access log: its lines, its file, and a disk that does not take them."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.access import ROUTES
from gateway.observability import access_log
from gateway.observability.access_log import AccessLog
from gateway.observability.receipts import Receipts
from gateway.observability.request_context import LoggedRequest, current_request
from gateway.observability.traceparent import read_parent
from gateway.policy.areas import AREA_OF_ROUTE, Area
from gateway.policy.caller import Caller
from tests.builders import (
    KeptTraces,
    LoadedModels,
    ScriptedInstance,
    read_all,
    soon,
    text_request,
    text_response,
)
from tests.conformance.spellings import filled
from tests.conftest import Serve
from tests.serving import wait_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"


def asked(log: AccessLog, *parents: str) -> LoggedRequest:
    return log.request("http", "/v2", "POST", "10.0.0.1", parents)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_line_has_the_tokens_and_the_error_of_its_request(
    serve: Serve, tmp_path: Path
) -> None:
    instance, log = ScriptedInstance(), AccessLog(tmp_path / "log")
    log.open()
    dataplane = DataPlane(LoadedModels(serve(instance)), access_log=log)  # type: ignore[arg-type]
    with asked(log) as request:
        caller = Caller(tenant="team", key_id="K1")
        with dataplane.infer(text_request(id="r", caller=caller)) as stream:
            execution = await instance.begun()
            execution.answer(text_response("a", tokens=2))
            execution.answer(text_response("b", tokens=3))
            execution.answer(InferenceError(Code.UNKNOWN, "the prompt was bad"))
            execution.end()
            with pytest.raises(InferenceError):
                await soon(read_all(stream))
        request.status = 200
    log.close()
    (found,) = lines(tmp_path / "log")
    assert found.pop("time").endswith("Z")
    assert found.pop("duration_ms") > 0
    assert found == {
        "wire": "http",
        "method": "POST",
        "route": "/v2",
        "status": 200,
        "code": "UNKNOWN",
        "peer": "10.0.0.1",
        "tenant": "team",
        "key_id": "K1",
        "model": "text",
        "version": "1",
        "request_id": "r",
        "completion_tokens": 5,
    }


async def test_without_a_request_of_a_wire_a_request_has_no_line(
    serve: Serve, tmp_path: Path
) -> None:
    instance, log = ScriptedInstance(), AccessLog(tmp_path / "log")
    log.open()
    dataplane = DataPlane(LoadedModels(serve(instance)), access_log=log)  # type: ignore[arg-type]
    with dataplane.infer(text_request()) as stream:
        (await instance.begun()).finish("done")
        assert await soon(read_all(stream)) == ["done"]
    log.close()
    assert lines(tmp_path / "log") == []


def test_requests_with_a_line_have_a_task_and_others_need_none(tmp_path: Path) -> None:
    for log, begins in ((AccessLog(tmp_path), False), (AccessLog(None), True), (None, True)):
        dataplane = DataPlane(LoadedModels(), access_log=log)  # type: ignore[arg-type]
        assert dataplane.begins_without_task(10) is begins


def test_the_current_request_is_that_of_the_innermost_block() -> None:
    log = AccessLog(None)
    with asked(log) as outer:
        part = outer.part("id", None)
        with part.current():
            assert current_request() is part
        assert current_request() is outer
    assert current_request() is None


@pytest.mark.parametrize(
    "parent",
    [
        "",
        f"00-{TRACE}",
        f"00-{TRACE.upper()}-01",
        f"ff-{TRACE}-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        f"00-{TRACE}-01\n",
        f"00-{TRACE}-01-x",
    ],
)
def test_a_malformed_traceparent_is_no_trace(parent: str) -> None:
    assert asked(AccessLog(None), parent).names() == {}
    trace_id, span_id = TRACE.split("-")
    names = {"trace_id": trace_id, "span_id": span_id}
    assert asked(AccessLog(None), f"00-{TRACE}-01").names() == names
    assert asked(AccessLog(None), parent, f"00-{TRACE}-01").names() == {}


def test_a_line_has_the_ids_of_the_span_that_begins_here_and_the_receipt(tmp_path: Path) -> None:
    log, traces, receipts = AccessLog(tmp_path / "log"), KeptTraces(), Receipts()
    log.open()
    for parent in (None, read_parent([f"00-{TRACE}-01"])):
        with asked(log, f"00-{TRACE}-01") as request:
            trace = traces.tracer(rate=1).begin("m", parent)
            receipts.begin(text_request(), request.began_ns, request.began_ns, wished=True)
        assert trace is not None
        assert trace.spans is not None
        assert request.trace_id == f"{trace.spans.trace_id:032x}"
        assert request.span_id == f"{trace.spans.root_id:016x}"
        assert (request.trace_id == TRACE[:32]) is (parent is not None)
    log.close()
    for line in lines(tmp_path / "log"):
        assert line["timing"].keys() == {"recv", "replay", "encode", "total"}


def test_long_texts_are_cut(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log")
    log.open()
    with asked(log) as request:
        request.id = request.model = "x" * 100_000
        request.caller = Caller(tenant="t" * 100_000, key_id="k" * 100_000)
    log.close()
    assert len((tmp_path / "log").read_bytes()) < 4096


def test_a_full_disk_stops_no_request_and_each_lost_line_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = AccessLog(Path("/dev/full"))
    log.open()
    with caplog.at_level(logging.ERROR, "sluice.access"):
        for _ in range(3):
            with asked(log):
                """A request."""
        wait_until(lambda: log.dropped == 3, "3 lines are lost")
        log.close()
    assert [each.message for each in caplog.records] == ["access log not written"]


def test_beyond_the_bound_of_waiting_lines_requests_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "MOST_LINES", 2)
    log = AccessLog(tmp_path / "log")
    for _ in range(5):
        with asked(log):
            """A request."""
    assert log.dropped == 3
    log.open()
    log.close()
    assert len(lines(tmp_path / "log")) == 2


def test_a_dash_is_the_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    log = AccessLog(Path("-"))
    log.open()
    with asked(log):
        """A request."""
    log.close()
    assert json.loads(capfd.readouterr().out)["route"] == "/v2"


@pytest.mark.parametrize(
    "route", [path for path, area in AREA_OF_ROUTE.items() if area is not Area.METRICS]
)
def test_a_path_has_the_template_of_its_route(route: str) -> None:
    assert ROUTES.of(filled(route)) == route


@pytest.mark.parametrize("path", ["/v2/models/a/b/infer", "/v2/none", "", "/v2/models/a/infer\n"])
def test_a_path_without_a_route_has_no_template(path: str) -> None:
    assert ROUTES.of(path) == ""
