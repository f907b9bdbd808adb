"""Index, load and unload with the official clients; the texts are those of Triton 2.51.

Where its current release differs, that counts; behind Triton's text for a model that was not even
read stands what is wrong with it.
"""

import base64
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests import raw
from tests.conformance.clients import Client
from tests.conformance.models import EVERY_VERSION, identity, scripted, with_parameters
from tests.rpc import connected
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

pytestmark = pytest.mark.own_models("loads and unloads")

FLAGS = ("--model-control-mode=explicit", "--load-model=add", "--strict-readiness=false")
ADD = identity("FP32", "1")
UNREAD = "failed to load '{0}', failed to poll from model repository: "
NO_VERSIONS = (
    "load failed for model '{0}': at least one version must be available under the version policy "
    "of model '{0}'\n"
)
NOT_FOUND = "Request for unknown model: '{}' is not found"
NONE_AVAILABLE = "Request for unknown model: '{}' has no available versions"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good models, and each kind of bad one."""
    folder = tmp_path_factory.mktemp("controlled")
    for name in ("add", "cycle", "changing", "bare", "..m"):
        write_model(folder, name, ADD)
    write_model(folder, "many", ADD + EVERY_VERSION, versions=(1, 2, 10))
    write_model(folder, "growing", ADD, versions=(1, 2))
    write_model(folder, "bad_text", "nonsense: 1\n")
    write_model(folder, "junk", "\x00\x01\x02")
    write_model(folder, "otherdir", ADD + 'name: "x"\n')
    write_model(folder, "fails", ADD + with_parameters({"load_fails": "no weights"}))
    write_model(folder, "nobackend", ADD.replace("identity", "absent"))
    write_model(folder, "badio", 'backend: "identity"\ninput { name: "IN" }\n')
    write_model(folder, "zeros", ADD, versions=("01",))
    for name, labels in (("unlabelled", "absent.txt"), ("outside", "../add/x")):
        named = f'name: "OUTPUT" label_filename: "{labels}"'
        write_model(folder, name, ADD.replace('name: "OUTPUT"', named))
    return folder


async def index(client: Client) -> list[dict[str, str]]:
    """The rows of the index, in one form for every wire."""
    found = await client.call("get_model_repository_index")
    if client.over_http:
        return list(found)
    rows = (
        {"name": r.name, "version": r.version, "state": r.state, "reason": r.reason}
        for r in found.models
    )
    return [{key: value for key, value in row.items() if value} for row in rows]


async def rows(client: Client, name: str) -> list[dict[str, str]]:
    return [row for row in await index(client) if row["name"] == name]


def config_of(**changes: Any) -> str:
    """The JSON of a config like ADD."""
    tensor = {"data_type": "TYPE_FP32", "dims": [1]}
    config = {
        "backend": "identity",
        "input": [{"name": "INPUT", **tensor}],
        "output": [{"name": "OUTPUT", **tensor}],
    }
    return json.dumps(config | changes)


async def test_models_never_loaded_are_listed_by_name_only(client: Client) -> None:
    assert await rows(client, "bare") == [{"name": "bare"}]
    assert await rows(client, "add") == [{"name": "add", "version": "1", "state": "READY"}]
    names = [row["name"] for row in await index(client)]
    assert names == sorted(names)


REFUSALS = {
    "absent": ("INTERNAL", UNREAD.format("absent") + "model 'absent' is not in any repository"),
    "...": ("INTERNAL", UNREAD.format("...") + "model '...' is not in any repository"),
    "bad_text": (
        "INTERNAL",
        UNREAD.format("bad_text") + "bad_text/config.pbtxt, line 1, column 1: found unknown field "
        "'nonsense', expected a field of ModelConfig",
    ),
    "junk": (
        "INTERNAL",
        UNREAD.format("junk") + "junk/config.pbtxt, line 1, column 1: found "
        "'\\x00\\x01\\x02', expected the name of a field",
    ),
    "otherdir": (
        "INTERNAL",
        UNREAD.format("otherdir") + "unexpected directory name 'otherdir' for model 'x', directory "
        "name must equal model name",
    ),
    "zeros": ("INVALID_ARGUMENT", NO_VERSIONS.format("zeros")),
    "fails": (
        "INVALID_ARGUMENT",
        "load failed for model 'fails': version 1 is at UNAVAILABLE state: Internal: no weights;\n",
    ),
    "badio": (
        "INVALID_ARGUMENT",
        "load failed for model 'badio': version 1 is at UNAVAILABLE state: Invalid argument: model "
        "input 'IN' must specify 'data_type' for badio;\n",
    ),
    "unlabelled": (
        "INVALID_ARGUMENT",
        "load failed for model 'unlabelled': version 1 is at UNAVAILABLE state: Internal: failed "
        "to open text file for read unlabelled/absent.txt: No such file or directory;\n",
    ),
    "outside": (
        "INVALID_ARGUMENT",
        "load failed for model 'outside': version 1 is at UNAVAILABLE state: Unsupported: label "
        "file path '../add/x' is outside model directory of model 'outside';\n",
    ),
    "  ": (
        "INVALID_ARGUMENT",
        "Model name cannot be empty. Please enter a valid name to deploy.",
    ),
    " .. ": (
        "INVALID_ARGUMENT",
        "invalid model name ' .. ', model name must not contain path traversal characters",
    ),
}


@pytest.mark.parametrize(("model", "refusal"), REFUSALS.items(), ids=[*REFUSALS])
async def test_what_cannot_be_loaded_says_why(
    client: Client, repository: Path, model: str, refusal: tuple[str, str]
) -> None:
    code, text = await client.refusal("load_model", model)
    assert (code, text) == (client.code(refusal[0]), refusal[1])
    assert str(repository) not in text
    assert await rows(client, "add") == [{"name": "add", "version": "1", "state": "READY"}]


async def test_a_backend_that_is_not_there_is_named(client: Client) -> None:
    code, text = await client.refusal("load_model", "nobackend")
    assert code == client.code("INVALID_ARGUMENT")
    assert "Invalid argument: unable to find backend 'absent'; installed backends: " in text
    (row,) = await rows(client, "nobackend")
    assert (row["state"], row["version"]) == ("UNAVAILABLE", "1")
    assert row["reason"].startswith("Invalid argument: unable to find backend 'absent'")


async def test_a_failed_load_has_another_error_than_an_unknown_model(client: Client) -> None:
    await client.refusal("load_model", "fails")
    await client.refusal("load_model", "bad_text")
    await client.refusal("load_model", "zeros")
    for model, version, code, text in [
        ("fails", "", "NOT_FOUND", NONE_AVAILABLE.format("fails")),
        (
            "fails",
            "1",
            "UNAVAILABLE",
            "Request for unknown model: 'fails' version 1 is not at ready state",
        ),
        ("fails", "2", "NOT_FOUND", "Request for unknown model: 'fails' version 2 is not found"),
        ("bad_text", "", "NOT_FOUND", NOT_FOUND.format("bad_text")),
        ("zeros", "", "NOT_FOUND", NONE_AVAILABLE.format("zeros")),
        ("bare", "", "NOT_FOUND", NOT_FOUND.format("bare")),
    ]:
        found = await client.refusal("get_model_metadata", model, version)
        assert found == (client.code(code), text)


async def test_a_model_comes_and_goes(client: Client) -> None:
    await client.call("load_model", "cycle")
    await client.call("load_model", "cycle")
    assert await client.call("is_model_ready", "cycle")
    await client.call("unload_model", "cycle")
    assert not await client.call("is_model_ready", "cycle")
    await eventually_unloaded(client, "cycle")
    assert await rows(client, "cycle") == [
        {"name": "cycle", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    ]
    code, text = await client.refusal("get_model_config", "cycle")
    assert (code, text) == (client.code("NOT_FOUND"), NONE_AVAILABLE.format("cycle"))
    await client.call("unload_model", "cycle")


async def eventually_unloaded(client: Client, name: str) -> None:
    """Unloading ends soon after the call has returned: there are no requests to wait for."""
    for _ in range(1000):
        if all(row.get("state") == "UNAVAILABLE" for row in await rows(client, name)):
            return
    raise AssertionError(f"{name} is still unloading")


@pytest.mark.parametrize("model", ["absent", "bare", " "])
async def test_unloading_what_is_not_loaded_is_fine(client: Client, model: str) -> None:
    await client.call("unload_model", model)
    await client.call("unload_model", model, unload_dependents=True)


async def test_every_version_is_listed_in_order(client: Client) -> None:
    await client.call("load_model", "many")
    found = await rows(client, "many")
    assert [(row["version"], row["state"]) for row in found] == [
        ("1", "READY"),
        ("2", "READY"),
        ("10", "READY"),
    ]


async def test_a_name_may_begin_with_dots(client: Client) -> None:
    await client.call("load_model", "..m")
    assert (await client.metadata("..m")).name == "..m"


async def test_a_config_may_come_with_the_request(client: Client) -> None:
    config = config_of(max_batch_size=4)
    await client.call("load_model", "changing", config=config)
    assert (await client.config("changing")).max_batch_size == 4
    await client.call("load_model", "changing")
    assert (await client.config("changing")).max_batch_size == 0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "Invalid config override: "),
        ("", "Invalid config override: "),
        ('{"nope": 1}', "Invalid config override: "),
        ('{"max_batch_size": "x"}', "Invalid config override: "),
        ('{"backend": "identity", "max_batch_size": -1}', "must be non-negative value for add"),
        ('{"backend": "identity", "name": "x"}', "unexpected directory name 'add' for model 'x'"),
        (
            '{"backend": "identity", "default_model_filename": "../../secret"}',
            "must stay within the version's folder",
        ),
    ],
)
async def test_a_config_that_is_none_changes_nothing(
    client: Client, config: str, said: str
) -> None:
    before = await client.config("add")
    if config == "" and not client.over_http:
        # The client leaves an empty config out, and a plain load changes nothing either.
        return
    code, text = await client.refusal("load_model", "add", config=config)
    assert code == client.code("INTERNAL")
    assert text.startswith(UNREAD.format("add"))
    assert said in text
    assert await client.config("add") == before


async def test_a_failed_reload_keeps_what_serves(client: Client) -> None:
    config = config_of(parameters={"load_fails": {"string_value": "too big"}})
    code, text = await client.refusal("load_model", "add", config=config)
    assert code == client.code("INVALID_ARGUMENT")
    assert text == (
        "load failed for model 'add': version 1 is at UNAVAILABLE state: Internal: too big;\n"
    )
    assert await rows(client, "add") == [{"name": "add", "version": "1", "state": "READY"}]
    assert await client.call("is_model_ready", "add", "1")


async def test_a_model_may_be_uploaded_whole(client: Client) -> None:
    name = "uploaded_" + client.wire.replace(".", "_")
    config = config_of(version_policy={"all": {}})
    files = {"file:3/model.bin": b"\x00weights", "file:5/model.bin": b""}
    await client.call("load_model", name, config=config, files=files)
    found = await rows(client, name)
    assert [(row["version"], row["state"]) for row in found] == [("3", "READY"), ("5", "READY")]
    await client.call("load_model", name, config=config, files={"file:3/model.bin": b"new"})
    assert await client.call("is_model_ready", name, "3")
    assert not await client.call("is_model_ready", name, "5")
    await client.call("unload_model", name)
    await eventually_unloaded(client, name)


@pytest.mark.parametrize("path", ["../x", "1/../../x", "..", ""])
async def test_uploaded_files_cannot_leave_their_folder(
    client: Client, repository: Path, path: str
) -> None:
    config = config_of()
    files = {f"file:{path}": b"owned"}
    code, text = await client.refusal("load_model", "add", config=config, files=files)
    assert code == client.code("INTERNAL")
    assert f"Invalid file parameter 'file:{path}' with normalized path '" in text
    assert "must stay within model directory." in text
    assert not (repository / "x").exists()


async def test_files_without_a_version_are_no_model(client: Client) -> None:
    config = config_of()
    files = {"file:/etc/x": b"", "file:config.pbtxt": b""}
    code, text = await client.refusal("load_model", "add", config=config, files=files)
    assert (code, text) == (client.code("INVALID_ARGUMENT"), NO_VERSIONS.format("add"))


async def test_the_extensions_are_listed(client: Client) -> None:
    found = (await client.server_metadata()).extensions
    assert {"model_repository", "model_repository(unload_dependents)"} <= set(found)


# HTTP only.


def post(http: httpx.Client, path: str, body: Any = None) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
    answer = http.post(path, content=content)
    return answer.status_code, answer.json() if answer.content else None


LOAD, UNLOAD = "/v2/repository/models/add/load", "/v2/repository/models/add/unload"
NOT_OFFERED = (501, {"error": "'repository_name' specification is not supported"})


def test_the_name_of_a_repository_is_left_alone_in_the_index_and_refused_elsewhere(
    http: httpx.Client,
) -> None:
    assert post(http, "/v2/repository/mine/index") == post(http, "/v2/repository/index")
    assert post(http, "/v2/repository/mine/models/add/load") == NOT_OFFERED
    assert post(http, "/v2/repository/mine/models/add/unload") == NOT_OFFERED


def test_the_index_may_be_of_ready_versions_only(http: httpx.Client) -> None:
    status, found = post(http, "/v2/repository/index", {"ready": True})
    assert status == 200
    assert {"name": "add", "version": "1", "state": "READY"} in found
    assert {row["state"] for row in found} == {"READY"}
    assert post(http, "/v2/repository/index", {"ready": False, "more": 1})[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (
            "/v2/repository/index",
            {"ready": 1},
            400,
            "Invalid value for 'ready': expected a boolean",
        ),
        ("/v2/repository/index", b"{", 500, "failed to parse the request JSON buffer"),
        (LOAD, b"{", 500, "failed to parse the request JSON buffer"),
        (LOAD, {"parameters": []}, 500, "attempt to get members for non-object"),
        (LOAD, {"parameters": {"x": "1"}}, 500, "unexpected error on creating Triton parameter"),
        (LOAD, {"parameters": {"config": 1}}, 500, "attempt to access JSON non-string as string"),
        (LOAD, {"parameters": {"config": None}}, 500, "non-string as string"),
        (
            LOAD,
            {"parameters": {"file:1/x": "AA=="}},
            500,
            "Load parameter 'config' must be specified for model file override",
        ),
        (
            LOAD,
            {"parameters": {"config": "{}", "file:1/x": "!"}},
            400,
            "load parameter 'file:1/x' is no base64 text",
        ),
        (
            LOAD,
            {"parameters": {"config": "{}", "file:1/x": f"{'A' * (2 << 20)}=={'A' * (2 << 20)}"}},
            400,
            "load parameter 'file:1/x' is no base64 text",
        ),
        (
            UNLOAD,
            {"parameters": {"unload_dependents": 1}},
            500,
            "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean",
        ),
        (
            "/v2/repository/models/%2e%2e/load",
            None,
            400,
            "invalid model name '..', model name must not contain path traversal characters",
        ),
        ("/v2/repository/models/a%00b/load", None, 400, "must not contain path traversal"),
        ("/v2/repository/models/a%2Fb/load", None, 404, "Not Found"),
    ],
)
def test_requests_that_are_none_are_refused(
    http: httpx.Client, path: str, body: Any, status: int, said: str
) -> None:
    found, answer = post(http, path, body)
    assert (found, said in answer["error"]) == (status, True), answer
    assert http.get("/v2/models/add/ready").status_code == 200


def test_empty_bodies_are_fine(http: httpx.Client) -> None:
    for body in (None, b"", b"{}", {"parameters": {}}, {"other": 1}):
        assert post(http, LOAD, body) == (200, None)
    assert http.get("/v2/repository/index").status_code == 405


# gRPC only.


def test_parameters_of_the_wrong_kind_are_refused(server: Serving) -> None:
    parameter = service_pb2.ModelRepositoryParameter
    with connected(server.grpc) as stub:
        for name, value, text in [
            ("x", parameter(string_param="1"), "unrecognized load parameter 'x'."),
            (
                "config",
                parameter(int64_param=1),
                "invalid value type for load parameter 'config', expected string_param.",
            ),
            (
                "config",
                parameter(),
                "invalid value type for load parameter 'config', expected string_param.",
            ),
            (
                "file:1/x",
                parameter(string_param="x"),
                "invalid value type for load parameter 'file:1/x', expected bytes_param.",
            ),
        ]:
            request = service_pb2.RepositoryModelLoadRequest(model_name="add")
            request.parameters[name].CopyFrom(value)
            assert status(stub.RepositoryModelLoad, request) == ("INVALID_ARGUMENT", text)
        unload = service_pb2.RepositoryModelUnloadRequest(model_name="add")
        unload.parameters["unload_dependents"].string_param = "x"
        assert status(stub.RepositoryModelUnload, unload) == (
            "INVALID_ARGUMENT",
            "invalid value type for 'unload_dependents' parameter, expected bool_param.",
        )
        for request, method in [
            (service_pb2.RepositoryIndexRequest(repository_name="x"), stub.RepositoryIndex),
            (
                service_pb2.RepositoryModelLoadRequest(repository_name="x", model_name="add"),
                stub.RepositoryModelLoad,
            ),
            (
                service_pb2.RepositoryModelUnloadRequest(repository_name="x", model_name="add"),
                stub.RepositoryModelUnload,
            ),
        ]:
            assert status(method, request) == (
                "UNIMPLEMENTED",
                "'repository_name' specification is not supported",
            )


def status(method: Any, request: Any) -> tuple[str, str]:
    try:
        method(request, timeout=WAIT_SECS)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


# Servers of their own.


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_load_and_unload_want_explicit_control(tmp_path: Path, mode: str) -> None:
    write_model(tmp_path, "add", ADD)
    refusal = {"error": "explicit model load / unload is not allowed if polling is enabled"}
    with (
        serving(tmp_path, f"--model-control-mode={mode}") as server,
        httpx.Client(base_url=server.http, timeout=WAIT_SECS) as http,
    ):
        for path in (LOAD, UNLOAD):
            assert post(http, path) == (503, refusal)
        assert post(http, "/v2/repository/index")[1] == [
            {"name": "add", "version": "1", "state": "READY"}
        ]


def test_polling_loads_what_is_copied_in_and_unloads_what_is_removed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_model(models, "add", ADD)
    flags = ("--model-control-mode=poll", "--repository-poll-secs=0.1")
    with serving(models, *flags) as server, httpx.Client(base_url=server.http) as http:

        def ready(model: str, version: str) -> bool:
            path = f"/v2/models/{model}/versions/{version}/ready"
            return http.get(path).status_code == 200

        (models / "half").mkdir()
        (models / "half" / "config.pbtxt").write_text(ADD[:15])
        server.wait_logged("model unreadable")
        assert http.get("/v2/health/ready").status_code == 400
        (models / "half" / "1").mkdir()
        (models / "half" / "config.pbtxt").write_text(ADD)
        wait_until(lambda: ready("half", "1"), "the whole model is loaded")
        assert http.get("/v2/health/ready").status_code == 200
        (models / "add" / "2").mkdir()
        wait_until(lambda: ready("add", "2"), "the new version is loaded")
        wait_until(lambda: not ready("add", "1"), "the old version is gone")
        shutil.rmtree(models / "half")
        wait_until(lambda: not ready("half", "1"), "what was removed is gone")


def test_no_request_fails_while_its_model_is_reloaded_again_and_again(tmp_path: Path) -> None:
    slow = identity("FP32", "1", delay_us=2000, concurrency=0)
    write_model(tmp_path, "add", slow)
    with serving(tmp_path, *FLAGS) as server:
        failures: list[object] = []
        answered = [0] * 4
        done = threading.Event()

        def ask(number: int) -> None:
            tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1], "data": [number]}
            with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as client:
                while not done.is_set():
                    answer = client.post("/v2/models/add/infer", json={"inputs": [tensor]})
                    if answer.status_code != 200 or answer.json()["outputs"][0]["data"] != [number]:
                        failures.append(answer.text)
                    answered[number] += 1

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for each in clients:
            each.start()
        with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as http:
            for number in range(20):
                (tmp_path / "add" / "1" / "weights").write_text("x" * number)
                before = sum(answered)
                assert post(http, LOAD) == (200, None)
                wait_until(lambda before=before: sum(answered) > before, "requests are answered")
        done.set()
        for each in clients:
            each.join(WAIT_SECS)
        assert failures == []


def test_sigterm_during_a_load_ends_the_server_and_answers_waiting_requests(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    write_model(tmp_path, "add", ADD)
    write_model(tmp_path, "slow", scripted({}, load_secs=600))
    with serving(tmp_path, *FLAGS, environment=environment) as server:
        found: list[tuple[int, Any]] = []

        def load() -> None:
            with httpx.Client(base_url=server.http, timeout=WAIT_SECS) as http:
                found.append(post(http, "/v2/repository/models/slow/load"))

        waiting = threading.Thread(target=load)
        waiting.start()
        server.wait_logged("loading model model=slow")
        assert server.stop(signal.SIGTERM) == 0
        waiting.join(WAIT_SECS)
    assert found == [(503, {"error": "Server exiting"})]
    assert "Traceback" not in server.text


def test_uploaded_files_are_gone_when_the_server_has_ended(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (tmp_path / "models").mkdir()
    config = config_of()
    with (
        serving(tmp_path / "models", FLAGS[0], environment={"TMPDIR": str(private)}) as server,
        httpx.Client(base_url=server.http, timeout=WAIT_SECS) as http,
    ):
        weights = bytes(range(256)) * (8 << 10) + b"end."
        files = {"file:1/model.bin": b"weights", "file:1/large.bin": weights}
        parts = {name: base64.b64encode(data).decode() for name, data in files.items()}
        body = {"parameters": {"config": config, **parts}}
        assert post(http, "/v2/repository/models/new/load", body) == (200, None)
        (folder,) = uploads(private)
        assert (private / folder / "1" / "model.bin").read_bytes() == b"weights"
        assert (private / folder / "1" / "large.bin").read_bytes() == weights
    assert uploads(private) == []


def test_a_server_removes_the_uploaded_files_of_one_that_was_killed(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (tmp_path / "models").mkdir()
    data = base64.b64encode(b"weights").decode()
    body = {"parameters": {"config": config_of(), "file:1/model.bin": data}}
    found: list[list[str]] = []
    for _ in range(2):
        with (
            serving(tmp_path / "models", FLAGS[0], environment={"TMPDIR": str(private)}) as server,
            httpx.Client(base_url=server.http, timeout=WAIT_SECS) as http,
        ):
            assert post(http, "/v2/repository/models/new/load", body) == (200, None)
            found.append(uploads(private))
            server.process.kill()
            server.process.wait()
    assert [len(each) for each in found] == [1, 1]
    assert found[0] != found[1]


def uploads(folder: Path) -> list[str]:
    return [each for each in os.listdir(folder) if each.startswith("sluice-upload-")]


def test_a_request_is_for_the_version_that_is_the_highest_when_its_body_has_arrived(
    server: Serving,
) -> None:
    def load(*versions: int) -> None:
        config = config_of(version_policy={"specific": {"versions": versions}})
        answer = httpx.post(
            f"{server.http}/v2/repository/models/growing/load",
            json={"parameters": {"config": config}},
            timeout=WAIT_SECS,
        )
        assert answer.status_code == 200, answer.text

    load(1)
    tensor = {"name": "INPUT", "shape": [1], "datatype": "FP32", "data": [1]}
    request = raw.post("/v2/models/growing/infer", json.dumps({"inputs": [tensor]}).encode())
    with raw.Connection(server.ports["http"]) as connection:
        connection.send(request[:-1])
        load(1, 2)
        connection.send(request[-1:])
        assert connection.answer().json["model_version"] == "2"
