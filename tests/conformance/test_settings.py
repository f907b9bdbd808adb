"""Log and trace settings on both wires, and the trace files of a running server.

The answers were checked once against Triton 2.51; where it takes half of a number ("7x") or wraps
one that is too large, this server refuses it instead.
"""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.conformance.clients import Client, connect, tensor
from tests.conformance.models import DECOUPLED, identity
from tests.rpc import connected
from tests.serving import START_SECS, WAIT_SECS, Serving, serving, wait_until, write_model

LOGGING = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models to be traced."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", identity("FP32", "4"))
    write_model(folder, "failing", identity("BYTES", "1", fail="no"))
    write_model(folder, "three", identity("BYTES", "1", responses=3) + DECOUPLED)
    return folder


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the server's traces."""
    return tmp_path_factory.mktemp("traces") / "trace.json"


@pytest.fixture(scope="module")
def server(models: Path, trace_file: Path) -> Iterator[Serving]:
    """A server that has a file for traces, and makes none."""
    flags = (f"triton,file={trace_file}", "rate=1", "triton,log-frequency=1")
    with serving(models, *(f"--trace-config={flag}" for flag in flags)) as started:
        yield started


@pytest.fixture
def http(server: Serving) -> Iterator[httpx.Client]:
    """A plain client; the server's settings are as before when the test ends."""
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as found:
        yield found
        found.post("/v2/logging", json={k: v for k, v in LOGGING.items() if k != "log_file"})
        cleared = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))
        found.post("/v2/trace/setting", json=cleared)
        found.post("/v2/models/echo/trace/setting", json=cleared)


@pytest.fixture(params=["http", "grpc"])
async def client(
    request: pytest.FixtureRequest, server: Serving, http: httpx.Client
) -> AsyncIterator[Client]:
    """Each wire in turn."""
    async with connect(server, request.param) as found:
        yield found


# Logs.


async def log_settings(client: Client, **settings: Any) -> dict[str, Any]:
    if not client.over_http:
        found = await client.call("update_log_settings", settings, as_json=True)
        told = {name: next(iter(value.values())) for name, value in found["settings"].items()}
        return {name: told[name] for name in LOGGING}
    return dict(await client.call("update_log_settings", settings))


async def test_log_settings_are_returned_and_changed(client: Client) -> None:
    assert await log_settings(client) == LOGGING
    changed = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert await log_settings(client, **changed) == LOGGING | changed
    assert await log_settings(client) == LOGGING | changed


async def test_the_log_file_stays_where_it_is(client: Client) -> None:
    code, text = await client.refusal("update_log_settings", {"log_file": "/tmp/x"})
    assert code == client.code("UNIMPLEMENTED")
    assert text == "log file location can not be updated through network protocol"


def test_what_is_logged_follows_the_settings(server: Serving, http: httpx.Client) -> None:
    http.post("/v2/logging", json={"log_format": "ISO8601"})
    http.get("/v2/models/first_unknown")
    server.wait_logged("first_unknown")
    (line,) = [line for line in server.log if "first_unknown" in line]
    assert line[4] == "-"
    assert "Z W " in line
    http.post("/v2/logging", json={"log_warning": False})
    http.get("/v2/models/second_unknown")
    http.post("/v2/logging", json={"log_warning": True})
    http.get("/v2/models/third_unknown")
    server.wait_logged("third_unknown")
    assert "second_unknown" not in server.text


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ('{"log_format":"x"}', 503, "invalid argument for --log_format, got: x"),
        ('{"log_info":1}', 500, "attempt to access JSON non-boolean as boolean"),
        ('{"log_format":3}', 500, "attempt to access JSON non-string as string"),
        ('{"log_verbose_level":-1}', 500, "non-unsigned-integer as unsigned-integer"),
        ('{"log_verbose_level":4294967296}', 400, "value is out of range [ 0, 4294967295 ]"),
        ('{"log_file":3}', 501, "log file location can not be updated"),
        ("", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ("[]", 500, "expected an object"),
        ('{"log_info":false,"log_format":"x"}', 503, "invalid argument for --log_format"),
    ],
)
def test_log_settings_that_cannot_be_change_nothing(
    http: httpx.Client, body: str, status: int, text: str
) -> None:
    answer = http.post("/v2/logging", content=body)
    assert (answer.status_code, text in answer.json()["error"]) == (status, True), answer.text
    assert http.get("/v2/logging").json() == LOGGING


@pytest.mark.parametrize("body", ["{}", '{"nope":1}', '{"log_info":null,"log_file":null}'])
def test_nulls_and_the_unknown_are_ignored(http: httpx.Client, body: str) -> None:
    answer = http.post("/v2/logging", content=body)
    assert (answer.status_code, answer.json()) == (200, LOGGING)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("log_info", {"uint32_param": 1}, "expect boolean for 'log_info'"),
        ("log_error", {}, "expect boolean for 'log_error'"),
        ("log_verbose_level", {"bool_param": True}, "expect int32 for 'log_verbose_level'"),
        ("log_format", {"bool_param": True}, "expect string for 'log_format'"),
        ("log_format", {"string_param": "x"}, "invalid argument for log_format, got: x"),
    ],
)
def test_log_settings_of_another_kind_are_refused_over_grpc(
    server: Serving, name: str, value: dict[str, Any], text: str
) -> None:
    request = service_pb2.LogSettingsRequest()
    request.settings[name].CopyFrom(service_pb2.LogSettingsRequest.SettingValue(**value))
    assert refusal(server, "LogSettings", request) == ("INVALID_ARGUMENT", text)


def refusal(server: Serving, method: str, request: Any) -> tuple[str, str]:
    with connected(server.grpc) as stub, pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(request, timeout=WAIT_SECS)
    error: Any = caught.value
    return error.code().name, error.details()


# Traces.


async def trace_settings(client: Client, model: str = "", **settings: Any) -> dict[str, Any]:
    found = await client.call("update_trace_settings", model or None, settings)
    if client.over_http:
        return dict(found)
    told = {name: list(each.value) for name, each in found.settings.items()}
    return {name: told[name] if name == "trace_level" else told[name][0] for name in told}


async def test_trace_settings_fall_back(client: Client, trace_file: Path) -> None:
    start = {
        "trace_level": ["OFF"],
        "trace_rate": "1",
        "trace_count": "-1",
        "log_frequency": "1",
        "trace_file": str(trace_file),
        "trace_mode": "triton",
    }
    assert await trace_settings(client) == start
    assert await trace_settings(client, "echo", trace_rate="3") == start | {"trace_rate": "3"}
    changed = {"trace_rate": "9", "log_frequency": "4"}
    assert await trace_settings(client, trace_rate="9", log_frequency="4") == start | changed
    found = await trace_settings(client, "echo")
    assert (found["trace_rate"], found["log_frequency"]) == ("3", "4")
    assert (await trace_settings(client, "echo", trace_rate=None))["trace_rate"] == "9"
    assert await trace_settings(client, trace_rate=None, log_frequency=None) == start


@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        ({"trace_rate": "x"}, "INVALID_ARGUMENT", "Unable to parse 'trace_rate', got: x"),
        (
            {"trace_rate": "4294967296"},
            "INVALID_ARGUMENT",
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: "
            "4294967296",
        ),
        (
            {"trace_count": "-5"},
            "INVALID_ARGUMENT",
            "Unable to parse 'trace_count'. Expecting value >= -1, got:-5",
        ),
        (
            {"trace_level": ["OFF", "TENSORS"]},
            "INVALID_ARGUMENT",
            "Expect only one trace level 'OFF' is specified",
        ),
        (
            {"trace_file": "x"},
            "UNIMPLEMENTED",
            "trace file location can not be updated through network protocol",
        ),
        (
            {"trace_rate": "0", "trace_level": ["TIMESTAMPS"]},
            "INVALID_ARGUMENT",
            "Attempting to set invalid trace setting :sample rate must be non-zero",
        ),
    ],
)
async def test_trace_settings_that_cannot_be_change_nothing(
    client: Client, settings: dict[str, Any], code: str, text: str
) -> None:
    before = await trace_settings(client)
    assert await client.refusal("update_trace_settings", None, settings) == (
        client.code(code),
        text,
    )
    assert await trace_settings(client) == before


async def test_an_unknown_model_has_no_trace_settings(client: Client) -> None:
    text = "Request for unknown model: 'nope' is not found"
    for found in (
        await client.refusal("get_trace_settings", "nope"),
        await client.refusal("update_trace_settings", "nope", {"trace_rate": "3"}),
    ):
        assert found == (client.code("NOT_FOUND"), text)


@pytest.mark.parametrize(
    ("body", "status"),
    [('{"trace_rate":5}', 500), ('{"trace_level":"OFF"}', 500), ("", 500), ("{}", 200)],
)
def test_trace_settings_over_http_are_strings(http: httpx.Client, body: str, status: int) -> None:
    assert http.post("/v2/trace/setting", content=body).status_code == status


def test_there_are_no_trace_settings_of_a_version(http: httpx.Client) -> None:
    assert http.get("/v2/models/echo/versions/1/trace/setting").status_code == 404


def test_more_values_than_one_are_refused_over_grpc(server: Serving) -> None:
    request = service_pb2.TraceSettingRequest()
    request.settings["trace_rate"].value.extend(["5", "6"])
    found = refusal(server, "TraceSetting", request)
    assert found == ("INVALID_ARGUMENT", "expect only 1 value for 'trace_rate'")


# Trace files.

CORE = ["REQUEST_START", "QUEUE_START", "INFER_RESPONSE_COMPLETE", "COMPUTE_START"]
CORE += ["COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END"]
OVER_HTTP = ["HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"]
OVER_GRPC = ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"]


def stamps(objects: list[dict[str, Any]]) -> list[str]:
    return [stamp["name"] for each in objects for stamp in each.get("timestamps", ())]


def next_trace(trace_file: Path, known: set[Path]) -> list[dict[str, Any]]:
    """The objects of the one trace that has been written since."""

    def written() -> set[Path]:
        return {
            path for path in trace_file.parent.iterdir() if not path.name.startswith(".")
        } - known

    wait_until(lambda: bool(written()), "a trace is written")
    (path,) = written()
    return list(json.loads(path.read_text()))


async def test_a_request_leaves_a_trace(server: Serving, client: Client, trace_file: Path) -> None:
    known = set(trace_file.parent.iterdir())
    await trace_settings(client, "echo", trace_level=["TIMESTAMPS", "TENSORS"])
    values = np.array([1.5, 2, 3, 4], dtype=np.float32)
    if client.over_http:
        inputs = [{"name": "INPUT", "datatype": "FP32", "shape": [4], "data": values.tolist()}]
        body = {"id": "abc", "inputs": inputs}
        async with httpx.AsyncClient(base_url=server.http) as plain:
            assert (await plain.post("/v2/models/echo/infer", json=body)).status_code == 200
    else:
        await client.call("infer", "echo", [tensor("INPUT", "FP32", values)], request_id="abc")
    found = next_trace(trace_file, known)
    assert sorted(stamps(found)) == sorted(CORE + (OVER_HTTP if client.over_http else OVER_GRPC))
    (about,) = [each for each in found if "model_name" in each]
    number = about.pop("id")
    assert about == {"model_name": "echo", "model_version": 1, "request_id": "abc"}
    assert {each.get("id", number) for each in found} == {number}
    shown = {"data": "1.5,2,3,4", "shape": "4", "dtype": "FP32"}
    assert [each for each in found if "tensor" in each] == [
        {"id": number, "activity": activity, "tensor": {"name": name, **shown}}
        for activity, name in (
            ("TENSOR_QUEUE_INPUT", "INPUT"),
            ("TENSOR_BACKEND_OUTPUT", "OUTPUT"),
        )
    ]


def test_a_stream_and_a_failure_leave_traces(http: httpx.Client, trace_file: Path) -> None:
    http.post("/v2/trace/setting", json={"trace_level": ["TIMESTAMPS"]})
    for path in ("three/generate_stream", "failing/generate"):
        known = set(trace_file.parent.iterdir())
        http.post(f"/v2/models/{path}", json={"INPUT": "x"})
        assert sorted(stamps(next_trace(trace_file, known))) == sorted(CORE + OVER_HTTP)


def test_a_refused_request_leaves_none(http: httpx.Client, trace_file: Path) -> None:
    known = set(trace_file.parent.iterdir())
    http.post("/v2/trace/setting", json={"trace_level": ["TIMESTAMPS"]})
    assert http.post("/v2/models/failing/generate", json={}).status_code == 400
    http.post("/v2/models/failing/generate", json={"INPUT": "x"})
    assert "REQUEST_END" in stamps(next_trace(trace_file, known))


def test_what_waits_is_written_at_the_end(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    flags = (f"triton,file={file}", "rate=2", "level=TIMESTAMPS")
    with serving(models, *(f"--trace-config={flag}" for flag in flags)) as started:
        for _ in range(4):
            httpx.post(f"{started.http}/v2/models/three/generate_stream", json={"INPUT": "x"})
    traced = {each["id"] for each in json.loads(file.read_text())}
    assert traced == {1, 2}


# The start.


def test_scripts_find_the_lines_that_they_wait_for(server: Serving) -> None:
    for service, wire in (
        ("GRPCInferenceService", "grpc"),
        ("HTTPService", "http"),
        ("Metrics Service", "metrics"),
    ):
        assert f'] "Started {service} at ' in server.text
        assert f':{server.ports[wire]}"' in server.text


def test_a_log_file_has_what_the_console_had(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "sluice.log"
    started = Serving(models, [f"--log-file={file}"])
    try:
        wait_until(
            lambda: file.exists() and "Started Metrics Service at" in file.read_text(),
            "the file says that it has started",
            START_SECS,
        )
    finally:
        assert started.stop() == 0
    assert "Started HTTPService at 127.0.0.1:" in file.read_text()
    assert not [line for line in started.log if "] " in line]


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--log-file=/nonexistent/sluice.log", "--log-file /nonexistent/sluice.log: No such"),
        ("--log-format=x", "argument --log-format: invalid choice: 'x'"),
    ],
)
def test_a_flag_that_cannot_be_ends_the_start(models: Path, flag: str, text: str) -> None:
    started = Serving(models, [flag])
    assert started.wait_ended() == 1
    assert text in started.text
    assert "Traceback" not in started.text
