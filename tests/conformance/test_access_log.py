"""The access log of a server: a line for each request, over both wires."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gateway.policy.keys import Role, new_key
from tests.conformance.keys import ECHO, bearer, status_of, stored, write
from tests.conformance.models import REPEAT, identity
from tests.conformance.openai_models import contract, piece
from tests.rpc import MAX_SECS, infer_request, streaming
from tests.scripted import installed
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

pytestmark = pytest.mark.runs_on("frontends")

ADMIN, INFER, LIMITED = new_key(), new_key(), new_key()
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01")
KEY = ("authorization", f"Bearer {INFER[0]}")
RPC = "/inference.GRPCInferenceService"
TRACE = {"trace_id": TRACE_ID, "span_id": SPAN_ID}
SINGLE = {"model": "single", "version": "1"}
CALLER = {"peer": "127.0.0.1", "tenant": "batch", "key_id": INFER[1]}
MESSAGE = '"message": "request refused"'
SECRET = "nothing-of-this"

Lines = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, server_kind: None) -> Path:
    return tmp_path_factory.mktemp("access") / "access.log"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "single", identity("BYTES", "1"))
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "chat", contract(piece("one"), piece("two", "stop"), {"final": True}))
    write(
        file.parent / "keys.toml",
        stored(ADMIN, tenant="ops", roles=frozenset({Role.ADMIN})),
        stored(INFER, tenant="batch"),
        stored(LIMITED, tenant="limited"),
        "[tenants.limited]\nrequests_per_minute = 1",
    )
    flags = (f"--api-keys={file.parent / 'keys.toml'}", f"--access-log={file}")
    environment = installed(tmp_path_factory.mktemp("backends"))
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    with serving(folder, *flags, *explicit, environment=environment) as started:
        yield started
    for each in (SECRET, ADMIN[0][20:], INFER[0][20:]):
        assert each not in file.read_text()


@pytest.fixture
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, timeout=WAIT_SECS, headers=bearer(INFER[0])) as client:
        yield client


@pytest.fixture
def channel(server: Serving) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as found:
        yield found


@pytest.fixture
def lines(server: Serving, file: Path) -> Lines:
    """The lines that a number of requests has added, without their times."""
    before = len(file.read_text().splitlines())

    def read(count: int) -> list[dict[str, Any]]:
        def found() -> list[str]:
            return file.read_text().splitlines()[before:]

        wait_until(lambda: len(found()) >= count, f"{count} lines are written")
        read_lines = [json.loads(line) for line in found()]
        for line in read_lines:
            assert line.pop("time").endswith("Z")
            assert 0 < line.pop("duration_ms") < WAIT_SECS * 1000
        return read_lines

    return read


def test_an_infer_over_http_has_a_line_with_its_caller_its_ids_and_its_sizes(
    http: httpx.Client, lines: Lines
) -> None:
    body = {"id": "r1", "inputs": [{**ECHO["inputs"][0], "data": [SECRET]}]}
    answer = http.post(f"/v2/models/single/infer?{SECRET}", json=body, headers=[PARENT])
    assert lines(1) == [
        {
            **CALLER,
            **TRACE,
            **SINGLE,
            "wire": "http",
            "method": "POST",
            "route": "/v2/models/{model}/infer",
            "status": 200,
            "request_id": "r1",
            "bytes_in": len(answer.request.content),
            "bytes_out": int(answer.headers["content-length"]),
        }
    ]


@pytest.mark.parametrize(
    ("path", "body", "route", "model"),
    [
        (
            "/v2/models/repeat/versions/1/generate_stream",
            {"text_input": SECRET, "n": 2},
            "/v2/models/{model}/versions/{version}/generate_stream",
            "repeat",
        ),
        (
            "/v1/chat/completions",
            {
                "model": "chat",
                "stream": True,
                "messages": [{"role": "user", "content": SECRET}],
            },
            "/v1/chat/completions",
            "chat",
        ),
    ],
)
def test_a_stream_of_events_has_a_line_with_all_its_bytes(
    http: httpx.Client, lines: Lines, path: str, body: Any, route: str, model: str
) -> None:
    answer = http.post(path, json=body)
    (found,) = lines(1)
    assert found["bytes_out"] == len(answer.content)
    assert {"route": route, "status": 200, "model": model, **CALLER}.items() <= found.items()


def test_each_refusal_over_http_has_a_line_with_its_code_or_reason(
    http: httpx.Client, lines: Lines
) -> None:
    http.post("/v2/models/none/infer", json=ECHO)
    http.post("/v2/models/single/infer", json={"inputs": SECRET})
    http.post("/v2/models/single/infer", json=ECHO, headers=bearer(INFER[0] + "x"))
    http.post("/v2/repository/models/single/load")
    http.get(f"/{SECRET}")
    unknown, malformed, wrong, foreign, nowhere = lines(5)
    assert (unknown["status"], unknown["code"], unknown["tenant"]) == (404, "NOT_FOUND", "batch")
    assert malformed["status"] in (400, 500)
    assert malformed["code"] in ("INVALID_ARG", "INTERNAL")
    assert (wrong["status"], wrong["reason"]) == (401, "unauthenticated")
    assert "tenant" not in wrong
    assert (foreign["status"], foreign["reason"]) == (403, "forbidden")
    assert foreign["audit"] is True
    assert nowhere["status"] == 404
    assert "route" not in nowhere


def test_a_refusal_by_a_limit_has_a_line_with_its_reason_on_both_wires(
    http: httpx.Client, lines: Lines, channel: Any
) -> None:
    body, key = {"id": "r1", **ECHO}, bearer(LIMITED[0])
    for _ in range(2):
        http.post("/v2/models/single/infer", json=body, headers=key)
    with pytest.raises(grpc.RpcError):
        channel.unary_unary(f"{RPC}/ModelInfer")(
            infer_request("single", "r1", INPUT="x").SerializeToString(),
            metadata=[("authorization", key["Authorization"])],
            timeout=WAIT_SECS,
        )
    found = lines(3)
    assert "reason" not in found[0]
    assert [each["reason"] for each in found[1:]] == ["rate_limited"] * 2
    assert [each["status"] for each in found] == [200, 429, "RESOURCE_EXHAUSTED"]
    assert {each["tenant"] for each in found} == {"limited"}


def test_a_deadline_has_its_reason_and_its_time_in_the_line(
    http: httpx.Client, lines: Lines
) -> None:
    late = {"text_input": SECRET, "n": 3, "delay_us": 200_000, "deadline_ms": 250}
    http.post("/v2/models/repeat/generate_stream", json=late)
    http.post("/v2/models/repeat/generate_stream", json={**late, "n": 1, "deadline_ms": 9000})
    exceeded, served = lines(2)
    assert exceeded["reason"] == "deadline_exceeded"
    assert 250 <= exceeded["deadline_ms"] < 5000
    assert "reason" not in served
    assert 9000 <= served["deadline_ms"] < 14000


def test_a_change_is_marked_and_a_request_that_reads_is_not(
    http: httpx.Client, lines: Lines, channel: Any
) -> None:
    admin = bearer(ADMIN[0])
    metadata = [("authorization", admin["Authorization"])]
    http.post("/v2/logging", json={"log_verbose_level": 0}, headers=admin)
    http.get("/v2/logging", headers=admin)
    lines(2)  # another process, which serves the RPCs, may be faster than the thread of this one
    for settings in ({"log_verbose_level": {"uint32_param": 0}}, {}):
        message = service_pb2.LogSettingsRequest()
        for name, value in settings.items():
            message.settings[name].uint32_param = value["uint32_param"]
        send = channel.unary_unary(f"{RPC}/LogSettings")
        send(message.SerializeToString(), metadata=metadata, timeout=WAIT_SECS)
    found = lines(4)
    assert [each.get("audit", False) for each in found] == [True, False, True, False]
    assert {each["tenant"] for each in found} == {"ops"}


def test_a_unary_rpc_has_a_line_with_its_status(channel: Any, lines: Lines) -> None:
    request = infer_request("single", "r2", INPUT=SECRET)
    send = channel.unary_unary(f"{RPC}/ModelInfer")
    data = request.SerializeToString()
    answer = send(data, metadata=[KEY, PARENT], timeout=WAIT_SECS)
    with pytest.raises(grpc.RpcError):
        send(infer_request("none").SerializeToString(), metadata=[KEY], timeout=WAIT_SECS)
    wrong = [("authorization", "Bearer wrong")]
    assert status_of(channel, f"{RPC}/ModelInfer", wrong)[0] == "UNAUTHENTICATED"
    found, unknown, refused = lines(3)
    assert 0 < found.pop("deadline_ms") <= (WAIT_SECS + 1) * 1000  # that of the RPC
    assert found == {
        **CALLER,
        **TRACE,
        **SINGLE,
        "wire": "grpc",
        "route": f"{RPC}/ModelInfer",
        "status": "OK",
        "request_id": "r2",
        "bytes_in": len(data),
        "bytes_out": len(answer),
    }
    assert (unknown["status"], unknown["code"]) == ("NOT_FOUND", "NOT_FOUND")
    assert (refused["status"], refused["reason"]) == ("UNAUTHENTICATED", "unauthenticated")


def test_each_request_of_a_stream_has_a_line_and_the_rpc_only_if_it_fails(
    channel: Any, lines: Lines
) -> None:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    with streaming(stub, [KEY, PARENT]) as rpc:
        rpc.ask(infer_request("single", "a", INPUT="x"))
        rpc.answer()
        rpc.ask(infer_request("none", "b"))
        rpc.answer()
        rpc.rest()
    with streaming(stub) as rpc:
        assert rpc.error()[0] == "UNAUTHENTICATED"
    first, second, refused = lines(3)
    route = {"wire": "grpc", "route": f"{RPC}/ModelStreamInfer"}
    about = {**route, **CALLER, **TRACE}
    assert 0 < first.pop("deadline_ms") <= (MAX_SECS + 1) * 1000  # that of the RPC
    assert first == {**about, **SINGLE, "request_id": "a", "status": "OK"}
    refusal = {"status": "NOT_FOUND", "code": "NOT_FOUND"}
    assert second == {**about, **refusal, "request_id": "b"}
    assert refused["status"] == "UNAUTHENTICATED"


def test_lines_of_the_log_are_json_and_name_their_request(
    server: Serving, http: httpx.Client, lines: Lines
) -> None:
    admin = bearer(ADMIN[0])
    http.post("/v2/logging", json={"log_format": "json"}, headers=admin).raise_for_status()
    http.post("/v2/models/single/infer", json={"id": "r9", "inputs": []}, headers=[PARENT])
    server.wait_logged(MESSAGE)
    line = json.loads(next(each for each in server.log if MESSAGE in each))
    http.post("/v2/logging", json={"log_format": "default"}, headers=admin).raise_for_status()
    assert len(lines(3)) == 3  # the next test finds none of them
    assert line["time"].endswith("Z")
    about = {"severity": "WARNING", "logger": "sluice.http", "code": "INVALID_ARG"}
    assert {**about, **TRACE, "tenant": "batch"}.items() <= line.items()


def test_a_renamed_file_is_made_again(http: httpx.Client, file: Path, lines: Lines) -> None:
    moved = file.rename(file.with_suffix(".1"))
    http.get("/v2/health/live")
    wait_until(file.exists, "the file is made again")
    wait_until(lambda: "health/live" in file.read_text(), "the line is written")
    with file.open("a") as found:
        found.write(moved.read_text())  # for the check of all lines at the end


def test_a_file_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    started = Serving(tmp_path, [f"--access-log={tmp_path}/no/access.log"])
    assert started.wait_ended() == 1
    text = f"sluice: --access-log {tmp_path}/no/access.log: No such file or directory"
    assert started.said == [text]
