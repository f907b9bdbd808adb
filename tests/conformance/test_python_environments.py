"""Python models with packages of their own, and backends that are folders with a model.py."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.conformance.clients import Client, connect
from tests.serving import Serving, serving
from tests.wheels import write_numpy, write_wheel

WIRES = ("http.aio", "grpc.aio")
SAYS = """
import importlib.util
import numpy as np
import triton_python_backend_utils as pb_utils
{imports}

class TritonPythonModel:
    def execute(self, requests):
        return [self._answer() for _ in requests]

    def _answer(self):
        said = {said}
        tensor = pb_utils.Tensor("SAID", np.array([said], np.object_))
        return pb_utils.InferenceResponse([tensor])
"""
CONFIG = """
backend: "{backend}"
input {{ name: "ASKED" data_type: TYPE_STRING dims: [ 1 ] }}
output {{ name: "SAID" data_type: TYPE_STRING dims: [ 1 ] }}
"""
SHOUT = """
import pathlib
import loudness
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "ASKED", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "SAID", "data_type": "TYPE_STRING", "dims": [1]})
        return config

    def initialize(self, args):
        word = pathlib.Path(pb_utils.get_model_dir(), "word.txt").read_text()
        self._said = loudness.louder(args["model_name"] + " " + word)

    def execute(self, requests):
        tensor = pb_utils.Tensor("SAID", np.array([self._said], np.object_))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""
HAS_FASTAPI = "str(importlib.util.find_spec('fastapi') is not None)"
BUILDS_FOREVER = """
import time

def get_requires_for_build_wheel(config_settings=None):
    time.sleep(600)
"""

pytestmark = pytest.mark.timeout(180)


def write_python(repository: Path, name: str, said: str, imports: str = "") -> Path:
    """A Python model that says what the expression is; its folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(SAYS.format(said=said, imports=imports))
    (folder / "config.pbtxt").write_text(CONFIG.format(backend="python"))
    return folder


def require(model: Path, *lines: str) -> None:
    write_numpy(model / "wheels")
    write_wheel(model / "wheels", "greeting", {"greeting.py": "TEXT = 'hello'\n"})
    text = "\n".join(("--no-index", "--find-links wheels", *lines, ""))
    (model / "requirements.txt").write_text(text)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_python(folder, "plain", f"'plain ' + {HAS_FASTAPI}")
    said = f"greeting.TEXT + ' ' + {HAS_FASTAPI}"
    require(write_python(folder, "greeter", said, "import greeting"), "greeting")
    require(write_python(folder, "broken", "''"), "nowhere==3")
    slow = write_python(folder, "slow", "''")
    (slow / "package").mkdir()
    (slow / "package" / "building.py").write_text(BUILDS_FOREVER)
    (slow / "package" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "building"\nbackend-path = ["."]\n'
    )
    require(slow, "./package")
    for name in ("cat", "dog"):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "word.txt").write_text("here")
        (folder / name / "config.pbtxt").write_text('backend: "shout"\n')
    chosen = CONFIG.format(backend="identity") + 'runtime: "model.py"\n'
    (folder / "chosen" / "1").mkdir(parents=True)
    (folder / "chosen" / "config.pbtxt").write_text(chosen)
    return folder


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends")
    (folder / "shout").mkdir()
    (folder / "shout" / "model.py").write_text(SHOUT)
    (folder / "shout" / "loudness.py").write_text("louder = str.upper\n")
    return folder


@pytest.fixture(scope="module")
def server(
    repository: Path, backends: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """Explicit control; environments are kept in a store of its own."""
    flags = (
        "--model-control-mode=explicit",
        "--load-model=plain",
        f"--backend-directory={backends}",
        f"--model-store-path={tmp_path_factory.mktemp('store')}",
    )
    with serving(repository, *flags) as started:
        yield started
    assert started.process.returncode == 0, started.log[-100:]


@pytest.fixture(params=WIRES)
async def client(request: pytest.FixtureRequest, server: Serving) -> AsyncIterator[Client]:
    async with connect(server, request.param) as found:
        yield found


async def load(server: Serving, model: str) -> str:
    """The reason why a model cannot load, or nothing; pip takes longer than the clients wait."""
    async with httpx.AsyncClient(timeout=120) as patient:
        answer = await patient.post(f"{server.http}/v2/repository/models/{model}/load")
    error: str = answer.json().get("error", "") if answer.content else ""
    return error


async def said(client: Client, model: str) -> str:
    wire: Any = tritonclient.http if client.over_http else tritonclient.grpc
    asked = wire.InferInput("ASKED", [1], "BYTES")
    asked.set_data_from_numpy(np.array([b"?"], np.object_))
    found = await client.call("infer", model, [asked])
    text: str = found.as_numpy("SAID")[0].decode()
    return text


async def test_a_model_with_requirements_has_its_packages_and_none_of_the_gateways(
    server: Serving, client: Client
) -> None:
    assert await load(server, "greeter") == ""
    assert await said(client, "greeter") == "hello False"
    assert await said(client, "plain") == "plain True"


async def test_a_failed_environment_is_reported_and_other_models_are_served(
    server: Serving, repository: Path
) -> None:
    text = await load(server, "broken")
    assert "the environment that its requirements.txt asks for cannot be made" in text
    assert "No matching distribution found for nowhere==3" in text
    assert str(repository.parent) not in text
    for wire in WIRES:
        async with connect(server, wire) as client:
            assert await said(client, "plain") == "plain True"


async def test_a_folder_of_the_backend_directory_serves_every_model_that_names_it(
    client: Client, backends: Path
) -> None:
    for model in ("cat", "dog"):
        await client.call("load_model", model)
    assert await said(client, "cat") == "CAT HERE"
    assert await said(client, "dog") == "DOG HERE"
    assert (await client.config("cat")).runtime == "model.py"  # as on Triton
    (backends / "shout" / "loudness.py").write_text("louder = lambda text: text.upper() + '!'\n")
    try:
        await client.call("unload_model", "cat")
        await client.call("load_model", "cat")
        assert await said(client, "cat") == "CAT HERE!"
        assert await said(client, "dog") == "DOG HERE"
    finally:
        (backends / "shout" / "loudness.py").write_text("louder = str.upper\n")
        for model in ("cat", "dog"):
            await client.call("unload_model", model)


async def test_a_runtime_that_no_folder_provides_is_refused_with_tritons_text(
    client: Client, backends: Path
) -> None:
    _, text = await client.refusal("load_model", "chosen")
    assert (
        "unable to find Python backend based backend library 'model.py' for model 'chosen', "
        "searched: 'identity' in the --backend-directory"
    ) in text
    assert str(backends) not in text


async def test_a_stopping_server_waits_for_no_installation(
    repository: Path, tmp_path: Path
) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=slow", f"--model-store-path={tmp_path}")
    started = Serving(repository, flags)
    try:
        await asyncio.to_thread(started.wait_logged, "environment build in progress", 60)
        assert "model=slow" in started.text
        started.begin_stop()
        assert await asyncio.to_thread(started.wait_ended, 15) == 0, started.text
    finally:
        started.stop()
    kept = tmp_path / ".kept" / "python"
    assert {each.suffix for each in kept.iterdir()} == {".lock"}
