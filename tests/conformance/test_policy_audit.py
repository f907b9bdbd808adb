"""The audit log of a server: lines for all that changes it, over both wires and by itself."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from gateway.policy.areas import GRPC_CHANGES, GRPC_SETTINGS, HTTP_CHANGES, Area
from gateway.policy.audit import action_of
from gateway.policy.keys import Role, new_key
from tests.conformance.keys import bearer, stored, write
from tests.conformance.models import REPEAT
from tests.conformance.spellings import filled
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

pytestmark = pytest.mark.runs_on("frontends")

ADMIN, INFER, OBSERVE = new_key(), new_key(), new_key()
HTTP = [(area, path) for area, paths in HTTP_CHANGES.items() for path in paths]
GRPC = [(area, path) for area, paths in GRPC_CHANGES.items() for path in paths]
SETTINGS = [(area, path) for area, paths in GRPC_SETTINGS.items() for path in paths]
OPS = {"tenant": "ops", "key": ADMIN[1]}
BATCH = {"tenant": "batch", "key": INFER[1]}
LOAD = "/v2/repository/models/{model}/load"
RPC = "/inference.GRPCInferenceService"

Lines = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, server_kind: None) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "repeat", REPEAT)
    write(
        file.parent / "keys.toml",
        stored(ADMIN, tenant="ops", roles=frozenset({Role.ADMIN})),
        stored(INFER, tenant="batch"),
        stored(OBSERVE, tenant="batch", roles=frozenset({Role.OBSERVE})),
    )
    flags = (f"--api-keys={file.parent / 'keys.toml'}", f"--audit-log={file}")
    models = ("--model-control-mode=explicit", "--load-model=repeat", "--load-model=missing")
    others = ("--exit-on-error=false", "--allow-client-shm=true", "--http-restricted-api")
    restricted = "logging:x-ops=secret"
    with serving(folder, *flags, *models, *others, restricted) as started:
        wait_until(lambda: file.read_text().count("\n") == 2, "the loads have their lines")
        yield started
    written = file.read_text()
    for key, _, _ in (ADMIN, INFER, OBSERVE):
        assert key[20:] not in written
    assert "secret" not in written


@pytest.fixture
def http(server: Serving) -> Iterator[httpx.Client]:
    headers = {**bearer(ADMIN[0]), "x-ops": "secret"}
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS, headers=headers) as client:
        yield client


@pytest.fixture
def channel(server: Serving) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as found:
        yield found


@pytest.fixture
def lines(server: Serving, file: Path) -> Lines:
    """The lines that a number of changes has added, without their times."""
    before = len(file.read_text().splitlines())

    def read(count: int) -> list[dict[str, Any]]:
        def found() -> list[str]:
            return file.read_text().splitlines()[before:]

        wait_until(lambda: len(found()) >= count, f"{count} lines are written")
        read_lines = [json.loads(line) for line in found()]
        assert all(line.pop("time").endswith("Z") for line in read_lines)
        return read_lines

    return read


def line(area: Area, route: str, wire: str = "http", **members: Any) -> dict[str, Any]:
    found = {"area": area, "action": action_of(route), "by": "client", "wire": wire}
    return {**found, "route": route, "address": "127.0.0.1", **members}


def call(channel: Any, path: str, message: bytes = b"", key: str = "") -> None:
    metadata = [("authorization", f"Bearer {key}")] if key else []
    with suppress(grpc.RpcError):
        channel.unary_unary(path)(message, metadata=metadata, timeout=WAIT_SECS)


def test_the_loads_at_the_start_are_changes_by_the_server(server: Serving, file: Path) -> None:
    first = [json.loads(line) for line in file.read_text().splitlines()[:2]]
    about = {"area": "model-repository", "action": "load", "by": "server"}
    for found in first:
        assert about.items() <= found.items()
    assert {each["model"]: each["result"] for each in first} == {
        "repeat": "ok",
        "missing": "NOT_FOUND",
    }


def test_each_route_that_changes_adds_a_line_for_each_caller(
    http: httpx.Client, lines: Lines
) -> None:
    callers: list[tuple[Mapping[str, str], Mapping[str, str]]] = [
        ({"authorization": ""}, {"result": "401"}),
        (bearer(INFER[0]), {**BATCH, "result": "403"}),
        (bearer(ADMIN[0]), OPS),
    ]
    for _, path in HTTP:
        for headers, _ in callers:
            http.post(filled(path), headers=headers, content=b"{}")
    found = iter(lines(len(HTTP) * len(callers)))
    for area, path in HTTP:
        for _, caller in callers:
            each = next(found)
            names = [name for name in ("model", "region", "repository") if f"{{{name}}}" in path]
            about = dict.fromkeys(names, "x")
            assert line(area, path, **caller, **about).items() <= each.items()
            assert ("error" in each) is (each["result"] != "ok")
    assert next(found, None) is None


def test_each_method_that_changes_adds_a_line_for_each_caller(channel: Any, lines: Lines) -> None:
    callers: list[tuple[str, Mapping[str, str]]] = [
        ("", {"result": "UNAUTHENTICATED"}),
        (INFER[0], {**BATCH, "result": "PERMISSION_DENIED"}),
        (ADMIN[0], OPS),
    ]
    for _, path in GRPC:
        for key, _ in callers:
            call(channel, path, key=key)
    found = lines(len(GRPC) * len(callers))
    expected = [(area, path, caller) for area, path in GRPC for _, caller in callers]
    for (area, path, caller), each in zip(expected, found, strict=True):
        assert line(area, path, "grpc", **caller).items() <= each.items()


def test_a_request_that_changes_nothing_adds_no_line(
    http: httpx.Client, channel: Any, lines: Lines
) -> None:
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/systemsharedmemory/status"):
        assert http.get(path).status_code == 200
    assert http.get(filled(LOAD)).status_code == 405
    assert http.get(filled(LOAD), headers={"authorization": ""}).status_code == 401
    assert http.post("/v2/repository/index").status_code == 200
    assert http.post("/v2/models/repeat/requests/a/cancel").status_code == 403
    for _, path in SETTINGS:
        call(channel, path, key=ADMIN[0])
    http.post(filled(LOAD).replace("load", "unload"))
    (only,) = lines(1)
    assert only["action"] == "unload"


def test_settings_are_in_the_line(http: httpx.Client, channel: Any, lines: Lines) -> None:
    path = "/v2/models/repeat/trace/setting"
    assert http.post(path, json={"trace_level": ["OFF"], "trace_rate": None}).status_code == 200
    assert http.post("/v2/logging", json={"log_format": "x\n\x1b[31m"}).status_code == 503
    traces = service_pb2.TraceSettingRequest(model_name="repeat")
    traces.settings["trace_rate"].value.append("7")
    logs = service_pb2.LogSettingsRequest()
    logs.settings["log_verbose_level"].uint32_param = 0
    for name, message in (("TraceSetting", traces), ("LogSettings", logs)):
        for key in (OBSERVE[0], ADMIN[0]):
            call(channel, f"{RPC}/{name}", message.SerializeToString(), key)
    refused = {"tenant": "batch", "key": OBSERVE[1], "result": "PERMISSION_DENIED"}
    text = f"the API key '{OBSERVE[1]}' has the role observe, expected admin"
    assert lines(6) == [
        line(
            Area.TRACE,
            "/v2/models/{model}/trace/setting",
            model="repeat",
            settings={"trace_level": ["OFF"], "trace_rate": None},
            **OPS,
            result="ok",
        ),
        line(
            Area.LOGGING,
            "/v2/logging",
            settings={"log_format": "x\n\x1b[31m"},
            **OPS,
            result="503",
            error="invalid argument for --log_format, got: x\n\x1b[31m",
        ),
        line(Area.TRACE, f"{RPC}/TraceSetting", "grpc", **refused, error=text),
        line(
            Area.TRACE,
            f"{RPC}/TraceSetting",
            "grpc",
            model="repeat",
            settings={"trace_rate": ["7"]},
            **OPS,
            result="ok",
        ),
        line(Area.LOGGING, f"{RPC}/LogSettings", "grpc", **refused, error=text),
        line(
            Area.LOGGING,
            f"{RPC}/LogSettings",
            "grpc",
            settings={"log_verbose_level": 0},
            **OPS,
            result="ok",
        ),
    ]


def test_a_load_has_the_names_of_its_parameters_and_no_content(
    http: httpx.Client, channel: Any, lines: Lines
) -> None:
    given = {"config": '{"backend":"repeat"}', "file:1/a": "c2VjcmV0"}
    assert http.post(filled(LOAD), json={"parameters": given}).status_code == 200
    load = service_pb2.RepositoryModelLoadRequest(model_name="x")
    load.parameters["config"].string_param = '{"backend":"nope"}'
    call(channel, f"{RPC}/RepositoryModelLoad", load.SerializeToString(), ADMIN[0])
    unload = {"parameters": {"unload_dependents": True}}
    assert http.post("/v2/repository/models/x/unload", json=unload).status_code == 200
    first, second, third = lines(3)
    names = ["config", "file:1/a"]
    area = Area.MODEL_REPOSITORY
    assert first == line(area, LOAD, model="x", parameters=names, **OPS, result="ok")
    assert second["parameters"] == ["config"]
    assert second["result"] == "INTERNAL"
    assert third["parameters"] == ["unload_dependents"]


def test_versions_and_labels_are_in_the_line(
    http: httpx.Client, channel: Any, lines: Lines
) -> None:
    given = {"parameters": {"versions": "1"}}
    http.post(filled(LOAD), json=given)
    load = service_pb2.RepositoryModelLoadRequest(model_name="x")
    load.parameters["versions"].string_param = "1"
    call(channel, f"{RPC}/RepositoryModelLoad", load.SerializeToString(), ADMIN[0])
    http.post("/v2/repository/models/x/labels", json={"labels": {"champion": 1, "old": None}})
    *loads, label = lines(3)
    assert [(each["versions"], each["parameters"]) for each in loads] == [("1", ["versions"])] * 2
    assert (label["action"], label["labels"]) == ("labels", {"champion": 1, "old": None})


def test_a_restricted_area_refuses_with_a_line(http: httpx.Client, lines: Lines) -> None:
    assert http.post("/v2/logging", headers={"x-ops": "wrong"}, json={}).status_code == 403
    (only,) = lines(1)
    text = "This API is restricted, expecting header 'x-ops'"
    assert only == line(Area.LOGGING, "/v2/logging", result="403", error=text)


def test_lines_that_are_not_written_are_counted_on_the_page_of_metrics(server: Serving) -> None:
    page = httpx.get(f"http://127.0.0.1:{server.ports['metrics']}/metrics", headers=OBSERVER)
    assert "\ngateway_audit_failures_total 0\n" in page.text


OBSERVER = bearer(OBSERVE[0])


def test_a_file_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    started = Serving(tmp_path, [f"--audit-log={tmp_path}/no/audit.log"])
    assert started.wait_ended() == 1
    text = f"sluice: --audit-log {tmp_path}/no/audit.log: No such file or directory"
    assert started.said == [text]
