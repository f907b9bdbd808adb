"""The Python of a model: its own if it has one, in a fixed order, else the gateway's."""

import dataclasses
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from backends.python import environments
from backends.python.environments import Places, WorkerEnvironment, interpreter
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from tests.wheels import write_numpy


@pytest.fixture
def places(tmp_path: Path) -> Places:
    version = tmp_path / "models" / "m" / "1"
    version.mkdir(parents=True)
    backend = tmp_path / "backends" / "b"
    backend.mkdir(parents=True)
    return Places(version=version, backend=backend, kept=tmp_path / "kept")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that sees the packages of the tests."""
    folder = tmp_path_factory.mktemp("ready") / "environment"
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    wheels = write_numpy(folder.parent)
    shutil.unpack_archive(wheels, site, "zip")
    return folder


def put(environment: Path, place: Path) -> Path:
    shutil.copytree(environment, place, symlinks=True)
    return place


async def chosen(places: Places, **parameters: str) -> WorkerEnvironment:
    return await interpreter(ModelConfig(name="m", parameters=parameters), places)


async def refusal(places: Places, **parameters: str) -> InferenceError:
    with pytest.raises(InferenceError) as refused:
        await chosen(places, **parameters)
    assert str(places.version.parents[2]) not in refused.value.message
    return refused.value


async def test_a_model_without_an_environment_has_the_gateways(places: Places) -> None:
    assert await chosen(places) == WorkerEnvironment(python=Path(sys.executable))


async def test_an_environment_is_taken_from_the_first_of_its_places(
    places: Places, ready: Path
) -> None:
    assert places.backend is not None
    for folder in (
        places.backend / ".venv",
        places.backend / "venv",
        places.model / ".venv",
        places.model / "venv",
        places.version / ".venv",
        places.version / "venv",
        places.model / "named",
    ):
        put(ready, folder)
        named = {"EXECUTION_ENV_PATH": str(folder)} if folder.name == "named" else {}
        assert (await chosen(places, **named)).python == folder / "bin" / "python"


async def test_requirements_of_the_model_come_before_the_environment_of_a_backend(
    places: Places, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[object] = []

    async def note(command: Sequence[str | Path], *_: object) -> None:
        if command[-2] == "venv":
            shutil.copytree(ready, command[-1], symlinks=True, dirs_exist_ok=True)
        else:
            installed.append(command[-1])

    monkeypatch.setattr(environments, "run", note)
    assert places.backend is not None
    put(ready, places.backend / "venv")
    (places.model / "requirements.txt").write_text("greeting\n")
    found = await chosen(places)
    assert found.python.is_relative_to(places.kept)
    assert installed == ["requirements.txt"]


def said(found: WorkerEnvironment, script: str) -> str:
    run = subprocess.run(
        [found.python, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | found.variables,
    )
    return run.stdout.strip()


async def test_a_virtual_environment_has_its_variables_and_no_paths_of_the_gateway(
    places: Places, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(places.kept))
    found = await chosen(
        Places(version=put(ready, places.model / "venv").parent / "1", kept=places.kept)
    )
    assert said(found, f"import sys; print({str(places.kept)!r} in sys.path)") == "False"
    assert said(found, "import os; print(os.environ['VIRTUAL_ENV'])") == str(places.model / "venv")
    assert found.variables["PATH"].startswith(f"{places.model / 'venv' / 'bin'}{os.pathsep}")


async def test_a_relative_place_is_found_from_anywhere(
    places: Places, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ready, places.model / "venv")
    monkeypatch.chdir(places.model.parent)
    found = await chosen(Places(version=Path("m/1"), kept=Path("../kept")))
    assert found.python == places.model / "venv" / "bin" / "python"


async def test_an_archive_in_the_folder_of_the_model_is_unpacked_and_activated(
    places: Places, ready: Path, tmp_path: Path
) -> None:
    source = put(ready, tmp_path / "source")
    (source / "bin" / "activate").write_text(
        'export CONDA_PREFIX="$(cd bin/.. && pwd)"\nexport GREETING="hello = world\nand all"\n'
    )
    with tarfile.open(places.model / "env.tar.gz", "w:gz") as archive:
        archive.add(source, ".")
    found = await chosen(places, EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    assert found.python.is_relative_to(places.kept)
    assert found.variables["CONDA_PREFIX"] == str(found.python.parent.parent)
    assert said(found, "import os; print(os.environ['GREETING'])") == "hello = world\nand all"
    assert "PWD" not in found.variables


async def test_the_archive_of_a_backend_serves_its_models(places: Places, ready: Path) -> None:
    assert places.backend is not None
    with tarfile.open(places.backend / "pb_exec_env_model.py.tar.gz", "w:gz") as archive:
        archive.add(ready, ".")
    found = await chosen(places)
    assert said(found, "import numpy; print(numpy.arange(2))") == "[0 1]"
    own = put(ready, places.model / "own")
    named = await chosen(places, EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/own")
    assert named.python == own / "bin" / "python"


async def test_a_path_without_an_environment_is_refused_with_tritons_text(places: Places) -> None:
    nowhere = "$$TRITON_MODEL_DIRECTORY/nowhere"
    for path, text in (
        (nowhere, f"Failed to get the canonical path for {nowhere}."),
        ("nowhere", "Failed to get the canonical path for nowhere."),
        (
            "$$TRITON_MODEL_DIRECTORY",
            "Path $$TRITON_MODEL_DIRECTORY/bin/activate does not exist. The Python environment "
            "should contain an 'activate' script.",
        ),
    ):
        error = await refusal(places, EXECUTION_ENV_PATH=path)
        assert error.code is Code.INTERNAL
        assert error.message == text


async def test_without_a_place_to_make_it_only_what_must_be_made_is_refused(
    places: Places, ready: Path
) -> None:
    nowhere = dataclasses.replace(places, kept=None)
    (places.model / "requirements.txt").write_text("greeting\n")
    error = await refusal(nowhere)
    assert error.code is Code.UNAVAILABLE
    assert error.message == (
        "model 'm': there is no place to make its environment: set SLUICE_CACHE to a folder (HOME "
        "is not set either)"
    )
    (places.model / "venv").symlink_to(ready)
    found = await interpreter(ModelConfig(name="m"), nowhere)
    assert found.python == places.model / "venv" / "bin" / "python"


async def test_an_environment_without_an_interpreter_is_refused(places: Places) -> None:
    (places.model / "venv").mkdir()
    error = await refusal(places)
    assert error.message == (
        "model 'm': its environment 'venv' cannot be used: it has no bin/python"
    )


async def test_an_environment_without_numpy_is_refused(places: Places) -> None:
    venv.create(places.model / ".venv", with_pip=False)
    error = await refusal(places)
    assert error.message == (
        "model 'm': its environment '.venv' cannot be used: its Python cannot import numpy: "
        "ModuleNotFoundError: No module named 'numpy'"
    )


async def test_an_interpreter_that_is_too_old_or_no_python_is_refused(places: Places) -> None:
    python = places.model / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for script, reason in (
        ("echo 3.9", "its bin/python is '3.9', expected Python 3.10 or later"),
        ("echo no; exit 1", "its Python cannot import numpy: status 1"),
        ("echo what", "its bin/python is 'what', expected Python 3.10 or later"),
        ("", "its Python cannot import numpy: 'python' cannot be started: Permission denied"),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755 if script else 0o644)
        assert (await refusal(places)).message.endswith(reason)


async def test_a_failing_activate_script_is_reported(places: Places, ready: Path) -> None:
    put(ready, places.model / "own")
    script = places.model / "own" / "bin" / "activate"
    script.write_text("echo not today >&2\nfalse\n")
    error = await refusal(places, EXECUTION_ENV_PATH="$$TRITON_MODEL_DIRECTORY/own")
    assert error.message.endswith("its 'activate' script fails: not today")
