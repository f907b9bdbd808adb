"""Single versions and labels, over each wire."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2

from gateway import cli
from tests import raw
from tests.conformance.clients import WIRES, Client
from tests.conformance.models import EVERY_VERSION, NEVER_US, REPEAT, identity
from tests.conformance.openai_models import contract, piece
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving, write_model

pytestmark = pytest.mark.own_models("loads and unloads")

MODELS = ("many", "repeat", "say", "chat", "a")
FLAGS = (
    *("--model-control-mode=explicit", "--strict-readiness=false"),
    *(f"--load-model={name}" for name in MODELS),
)
ADD = identity("FP32", "1")
STOL = (
    "failed to get model version from specified version string '{0}' (details: stol), version "
    "should be an integral value > 0"
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with several versions, and some with names like those of labels."""
    folder = tmp_path_factory.mktemp("versions")
    write_model(folder, "many", ADD, versions=(1, 2, 3, 4))
    write_model(folder, "repeat", REPEAT + EVERY_VERSION, versions=(1, 2))
    write_model(folder, "say", identity("BYTES", "1") + EVERY_VERSION, versions=(1, 2))
    answer = contract(piece("hello"), piece(reason="stop"))
    write_model(folder, "chat", answer + EVERY_VERSION, versions=(1, 2))
    write_model(folder, "a", ADD + EVERY_VERSION, versions=(1, 2))
    for wire in (*WIRES, "raw"):
        write_model(folder, f"a@{wire.replace('.', '-')}", ADD)
    return folder


def ask(server: Serving, wire: str, action: str, versions: str = "") -> str:
    """Load or unload versions of `many`; the text of the error, "" without one."""
    parameters = {"versions": versions} if versions else {}
    if wire == "http":
        url = f"{server.http}/v2/repository/models/many/{action.lower()}"
        answer = httpx.post(url, json={"parameters": parameters}, timeout=WAIT_SECS)
        return "" if answer.status_code == 200 else str(answer.json()["error"])
    request: Any = getattr(service_pb2, f"RepositoryModel{action}Request")(model_name="many")
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    with connected(server.grpc) as stub:
        try:
            getattr(stub, f"RepositoryModel{action}")(request, timeout=WAIT_SECS)
        except grpc.RpcError as error:
            return str(error.details())
    return ""


def ready(http: httpx.Client, name: str) -> list[str]:
    rows = http.post("/v2/repository/index", json={"ready": True}).json()
    return [row["version"] for row in rows if row["name"] == name]


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_versions_are_loaded_and_unloaded_alone(
    server: Serving, http: httpx.Client, wire: str
) -> None:
    assert ask(server, wire, "Load") == ""
    assert ready(http, "many") == ["4"]
    assert ask(server, wire, "Load", "2,3") == ""
    assert ready(http, "many") == ["2", "3", "4"]
    assert ask(server, wire, "Unload", "2") == ""
    assert ready(http, "many") == ["3", "4"]
    assert ask(server, wire, "Load") == ""
    assert ready(http, "many") == ["4"]
    assert ask(server, wire, "Unload", "4") == ""
    assert ready(http, "many") == []


@pytest.mark.parametrize("wire", ["http", "grpc"])
@pytest.mark.parametrize("action", ["Load", "Unload"])
def test_versions_that_the_model_does_not_have_change_nothing(
    server: Serving, http: httpx.Client, wire: str, action: str
) -> None:
    assert ask(server, wire, "Load") == ""
    assert ask(server, wire, action, "4,9") == "model 'many' has no version 9, it has 1, 2, 3, 4"
    assert "found 'four', expected version numbers" in ask(server, wire, action, "four")
    assert ready(http, "many") == ["4"]


@contextmanager
def labelled(http: httpx.Client, model: str, /, **labels: int) -> Iterator[None]:
    """In this block versions of a model have labels."""
    path = f"/v2/repository/models/{model}/labels"
    answer = http.post(path, json={"labels": labels})
    assert (answer.status_code, answer.json()) == (200, {"labels": labels})
    try:
        yield
    finally:
        assert http.post(path, json={"labels": dict.fromkeys(labels)}).json() == {"labels": {}}


async def versions(client: Client, model: str, version: str = "") -> tuple[str, str]:
    """The name and the version in the answer of an inference."""
    kind = tritonclient.http.InferInput if client.over_http else tritonclient.grpc.InferInput
    given = kind("INPUT", [1], "FP32")
    given.set_data_from_numpy(np.ones(1, np.float32))
    answer = (await client.call("infer", model, [given], version)).get_response()
    if client.over_http:
        return answer["model_name"], answer["model_version"]
    return answer.model_name, answer.model_version


async def test_a_label_is_a_version_and_a_part_of_a_name(
    client: Client, http: httpx.Client
) -> None:
    with labelled(http, "a", champion=1):
        assert await versions(client, "a") == ("a", "2")
        assert await versions(client, "a", "champion") == ("a", "1")
        assert await versions(client, "a@champion") == ("a", "1")
        assert list((await client.metadata("a@champion")).versions) == ["1"]
        assert list((await client.metadata("a", "champion")).versions) == ["1"]
        (row,) = (await client.statistics("a", "champion")).model_stats
        assert row.version == "1"
        assert await client.call("is_model_ready", "a@champion")
        code, text = await client.refusal("infer", "a@champion", [], model_version="2")
        assert (code, "'a@champion'" in text) == (client.code("NOT_FOUND"), True)
    code, text = await client.refusal("infer", "a@champion", [])
    assert (code, text.split(": ")[-1]) == (client.code("NOT_FOUND"), "'a@champion' is not found")


async def test_a_model_of_the_whole_name_comes_before_a_label(
    client: Client, http: httpx.Client
) -> None:
    label = client.wire.replace(".", "-")
    name = f"a@{label}"
    with labelled(http, "a", **{label: 1}):
        for _ in range(2):
            assert await versions(client, name) == ("a", "1")
        await client.call("load_model", name)
        for _ in range(2):
            assert await versions(client, name) == (name, "1")
        assert await versions(client, "a", label) == ("a", "1")


def test_a_model_with_the_name_of_a_label_gets_the_next_request_of_a_connection(
    server: Serving, http: httpx.Client
) -> None:
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1], "data": [1]}
    with labelled(http, "a", raw=1), raw.Connection(server.ports["http"]) as connection:
        for name in ("a", "a", "a@raw"):
            if name == "a@raw":
                assert http.post("/v2/repository/models/a@raw/load").status_code == 200
            connection.ask("/v2/models/a@raw/infer", {"inputs": [tensor]})
            found = connection.answer().json
            assert (found["model_name"], found["model_version"]) == (name, "1")


def test_a_label_moves_without_a_pause(http: httpx.Client) -> None:
    body = {"INPUT": "x"}
    with labelled(http, "say", champion=1):
        for path in ("versions/champion/generate", "generate"):
            name = "say" if path.startswith("versions") else "say@champion"
            assert http.post(f"/v2/models/{name}/{path}", json=body).json()["model_version"] == "1"
        labels = "/v2/repository/models/say/labels"
        assert http.post(labels, json={"labels": {"champion": 2}}).json()["labels"] == {
            "champion": 2
        }
        answer = http.post("/v2/models/say@champion/generate", json=body).json()
        assert (answer["model_name"], answer["model_version"]) == ("say", "2")


@pytest.mark.parametrize(("name", "version"), [("repeat@champion", ""), ("repeat", "champion")])
def test_every_answer_of_a_stream_has_the_number_and_a_label_cancels(
    server: Serving, http: httpx.Client, name: str, version: str
) -> None:
    def asked(request_id: str, **inputs: int) -> Any:
        request = infer_request(name, request_id, text_input="x", **inputs)
        request.model_version = version
        return request

    with (
        labelled(http, "repeat", champion=1),
        connected(server.grpc) as stub,
        streaming(stub) as rpc,
    ):
        rpc.ask(asked("a", n=1))
        answers = [rpc.answer().infer_response]
        rpc.ask(asked("b", n=2, delay_us=NEVER_US))
        stop = service_pb2.ModelInferRequest(model_name=name, model_version=version, id="b")
        stop.parameters["cancel"].bool_param = True
        rpc.ask(stop)
        answers.append(rpc.answer().infer_response)
        assert answers[1].parameters["cancelled"].bool_param
        assert not answers[1].outputs
    for found in answers:
        assert (found.model_name, found.model_version) == ("repeat", "1")


def test_openai_clients_name_a_label_behind_the_model(http: httpx.Client) -> None:
    body = {
        "model": "chat@champion",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
    }
    with labelled(http, "chat", champion=1):
        assert "hello" in http.post("/v1/chat/completions", json=body).text
        assert http.get("/v1/models/chat@champion").json()["root"] == "chat"
    assert http.post("/v1/chat/completions", json=body).json()["error"]["message"] == (
        "The model `chat@champion` does not exist."
    )
    rows = http.get("/v2/models/chat/stats").json()["model_stats"]
    assert [row["inference_count"] for row in rows] == [1, 0]


def test_a_label_of_a_version_that_was_unloaded_says_so(
    server: Serving, http: httpx.Client
) -> None:
    assert ask(server, "http", "Load", "3") == ""
    with labelled(http, "many", champion=3):
        assert ask(server, "http", "Unload", "3") == ""
        answer = http.post("/v2/models/many/versions/champion/infer", json={})
        text = "label 'champion' of model 'many' is version 3, which is not loaded"
        assert (answer.status_code, answer.json()) == (503, {"error": text})


def test_a_version_that_is_no_label_is_refused_as_by_triton(
    server: Serving, http: httpx.Client
) -> None:
    assert http.post("/v2/models/a/versions/nope/infer", json={}).status_code == 404
    assert http.get("/v2/models/a/versions/nope").status_code == 404
    with connected(server.grpc) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(service_pb2.ModelInferRequest(model_name="a", model_version="nope"))
    assert caught.value.details() == STOL.format("nope")


@pytest.mark.parametrize(
    ("model", "labels", "text"),
    [
        ("a", {"3": 1}, "model 'a': found label '3', expected 1 to 32 of a-z, 0-9, '_' and '-', "),
        ("a", {"B": 1}, "model 'a': found label 'B', expected 1 to 32 of a-z, 0-9, "),
        ("a", {"stable": 1}, "model 'a': label 'stable' is set by rollouts only"),
        (
            "a",
            {"c": 9},
            "label 'c' of model 'a' cannot be version 9, which is not loaded; loaded versi",
        ),
        ("a", {"c": "1"}, "'labels': found \"1\" for label 'c', expected a version number or null"),
        ("a", {"c": True}, "'labels': found true for label 'c', expected a version number or null"),
        ("a", {f"l{n}": 1 for n in range(17)}, "model 'a' may have 16 labels; remove one first"),
        ("a", [], "expected an object with the only member 'labels'"),
        ("nope", {"c": 1}, "Request for unknown model: 'nope' is not found"),
    ],
    ids=["number", "case", "stable", "not loaded", "text", "boolean", "many", "list", "no model"],
)
def test_labels_that_cannot_be_are_refused_and_change_nothing(
    http: httpx.Client, model: str, labels: Any, text: str
) -> None:
    answer = http.post(f"/v2/repository/models/{model}/labels", json={"labels": labels})
    assert answer.status_code in (400, 404)
    assert answer.json()["error"].startswith(text)
    assert http.get("/v2/repository/models/a/labels").json() == {"labels": {}}
    assert http.get("/v2/models/a/ready").status_code == 200


def test_the_command_shows_and_changes_labels(
    server: Serving, http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["label", "a", "champion=2", "old=1", "--url", server.http])
    assert capsys.readouterr().out == "champion=2\nold=1\n"
    cli.main(["label", "a", "champion=", "--url", server.http])
    cli.main(["label", "a", "--url", server.http])
    assert capsys.readouterr().out == "old=1\n" * 2
    for change, text in (
        ("old=9", "sluice: label 'old' of model 'a' cannot be version 9, which is not loaded"),
        ("old", "'old': expected LABEL=VERSION, such as champion=3"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["label", "a", change, "--url", server.http])
        assert text in capsys.readouterr().err
    cli.main(["label", "a", "old=", "--url", server.http])
