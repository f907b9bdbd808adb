"""Servers whose repository is the folder of one model, as KServe's storage initializer makes it."""

from pathlib import Path

import httpx
import pytest

from tests.conformance.models import identity
from tests.serving import Serving, serving, wait_until, write_model

ADD = identity("FP32", "1")
SERVED = {"MODEL_NAME": "served"}
POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.1")
EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
REQUEST = {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1], "data": [7]}]}


def folder_of(repository: Path, config: str = ADD) -> Path:
    """The folder of a model, named as KServe names it."""
    write_model(repository, "models", config)
    return repository / "models"


def index(server: Serving) -> list[tuple[str, str, str]]:
    rows = httpx.post(f"{server.http}/v2/repository/index").json()
    return [(row["name"], row.get("version", ""), row.get("state", "")) for row in rows]


def infer(server: Serving, name: str) -> tuple[int, str]:
    answer = httpx.post(f"{server.http}/v2/models/{name}/infer", json=REQUEST)
    return answer.status_code, answer.json().get("model_version", "")


@pytest.mark.own_models("loads and unloads")
def test_a_polled_folder_is_the_model_of_the_variable_and_gets_new_versions(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, ADD + 'name: "named"\n')
    with serving(folder, *POLL, environment=SERVED) as server:
        assert infer(server, "served") == (200, "1")
        assert infer(server, "models")[0] == infer(server, "named")[0] == 404
        (folder / "2").mkdir()
        wait_until(lambda: infer(server, "served") == (200, "2"), "the new version serves")
        rows = index(server)
    assert rows == [("served", "1", "UNAVAILABLE"), ("served", "2", "READY")]
    assert "field ignored model=served field=name" in server.text


@pytest.mark.own_models("loads and unloads")
def test_the_model_of_a_folder_is_loaded_and_unloaded_on_request(tmp_path: Path) -> None:
    with serving(folder_of(tmp_path), *EXPLICIT, "--strict-readiness=false") as server:
        assert index(server) == [("models", "1", "READY")]
        control = f"{server.http}/v2/repository/models"
        assert httpx.post(f"{control}/models/unload").status_code == 200
        wait_until(lambda: index(server)[0][2] == "UNAVAILABLE", "the model is unloaded")
        assert httpx.post(f"{control}/models/load").status_code == 200
        assert infer(server, "models") == (200, "1")
        absent = httpx.post(f"{control}/1/load")
    assert absent.json()["error"].endswith("model '1' is not in any repository")


@pytest.mark.parametrize(
    ("model", "flags", "environment", "error"),
    [
        ("both", (), {}, "found models in it, too: inner; expected one"),
        ("named", (), {"MODEL_NAME": "a/b"}, "variable MODEL_NAME: found 'a/b', expected"),
        ("bare", ("--disable-auto-complete-config",), {}, "for read models/config.pbtxt: it is"),
    ],
)
def test_a_folder_that_cannot_be_a_model_ends_the_start(
    tmp_path: Path, model: str, flags: tuple[str, ...], environment: dict[str, str], error: str
) -> None:
    folder = folder_of(tmp_path)
    if model == "both":
        write_model(folder, "inner", ADD)
    if model == "bare":
        (folder / "config.pbtxt").unlink()
    server = Serving(folder, flags, environment)
    assert server.wait_ended() == 1
    assert error in server.text
    assert "Traceback" not in server.text
