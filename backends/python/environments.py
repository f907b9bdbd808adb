"""The Python and the variables of a model's worker."""

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backends.python.environment_builds import FILE, KeptFolders, unpacked, virtual_environment
from backends.python.environment_commands import NO_PATHS_OF_OURS, CommandError, output
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

PARAMETER = "EXECUTION_ENV_PATH"
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
OF_BACKEND = "pb_exec_env_model.py.tar.gz"
FOLDERS = ("venv", ".venv")
OLDEST = (3, 10)
OF_THE_SHELL = ("_", "PS1", "PWD", "OLDPWD", "SHLVL", *NO_PATHS_OF_OURS)
PROBE = "import sys, numpy; print(*sys.version_info[:2], sep='.')"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """An interpreter, and variables of its process in addition to those of the gateway."""

    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The folders to search for a model's environment, and the folder for made ones.

    `backend` is the folder of a Python-based backend. The model's own come before the backend's.
    `kept` is None if there is no folder for made environments.
    """

    version: Path
    backend: Path | None = None
    kept: Path | None

    @property
    def model(self) -> Path:
        """The model's folder."""
        return self.version.parent

    def keep(self, model: str) -> KeptFolders:
        """The folders of made environments; UNAVAILABLE without a place for them."""
        if self.kept is None:
            raise InferenceError(
                Code.UNAVAILABLE,
                f"model '{model}': there is no place to make its environment: set SLUICE_CACHE to "
                "a folder (HOME is not set either)",
            )
        return KeptFolders(self.kept)

    @staticmethod
    def absolute(path: str) -> Path:
        """A path relative to the gateway, for processes in other folders."""
        return Path(path).absolute()


async def interpreter(config: ModelConfig, places: Places) -> WorkerEnvironment:
    """The model's own Python if it has one, else the gateway's.

    The order is: EXECUTION_ENV_PATH (an archive or a folder); `venv` or `.venv`, or else a
    requirements.txt, in the version's folder or the model's; then those of a Python-based backend.
    Making one may take minutes, and is logged. InferenceError if it is unusable or cannot be made.
    """
    if (named := config.parameters.get(PARAMETER)) is not None:
        return await _named(named, config.name, places)
    for folder in (places.version, places.model):
        if found := await _in_folder(folder.absolute(), config.name, places):
            return found
    backend = places.backend
    found = await _of_backend(backend.absolute(), config.name, places) if backend else None
    return found or WorkerEnvironment(python=Path(sys.executable))


async def _named(named: str, model: str, places: Places) -> WorkerEnvironment:
    """The environment of EXECUTION_ENV_PATH (python backend, execution environments)."""
    path = places.absolute(named.replace(MODEL_FOLDER, str(places.model)))
    if await asyncio.to_thread(path.is_file):
        path = await unpacked(path, model, places.keep(model))
    elif not await asyncio.to_thread(path.exists):
        raise InferenceError(Code.INTERNAL, f"Failed to get the canonical path for {named}.")
    elif not await asyncio.to_thread((path / "bin").is_dir):
        raise InferenceError(
            Code.INTERNAL,
            f"Path {named}/bin/activate does not exist. The Python environment should contain an "
            "'activate' script.",
        )
    return await _activated(path, named, model)


async def _of_backend(backend: Path, model: str, places: Places) -> WorkerEnvironment | None:
    if not (backend / OF_BACKEND).exists():
        return await _in_folder(backend, model, places)
    folder = await unpacked(backend / OF_BACKEND, model, places.keep(model))
    return await _activated(folder, OF_BACKEND, model)


async def _in_folder(folder: Path, model: str, places: Places) -> WorkerEnvironment | None:
    for name in FOLDERS:
        if (folder / name).is_dir():
            await _check(folder / name, name, model)
            return _virtual(folder / name)
    if (folder / FILE).is_file():
        return _virtual(await virtual_environment(folder / FILE, model, places.keep(model)))
    return None


def _virtual(folder: Path) -> WorkerEnvironment:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    variables = {**NO_PATHS_OF_OURS, "VIRTUAL_ENV": str(folder), "PATH": path}
    return WorkerEnvironment(python=folder / "bin" / "python", variables=variables)


async def _activated(folder: Path, name: str, model: str) -> WorkerEnvironment:
    """An environment with the variables that its `activate` sets, as Triton sources it."""
    await _check(folder, name, model)
    if not (folder / "bin" / "activate").exists():
        return _virtual(folder)
    variables = {**NO_PATHS_OF_OURS, **await _set_by_activate(folder, name, model)}
    return WorkerEnvironment(python=folder / "bin" / "python", variables=variables)


async def _set_by_activate(folder: Path, name: str, model: str) -> Mapping[str, str]:
    # The scripts are written for bash, and only a shell can find the variables that they set.
    script = "source bin/activate >/dev/null && exec env -0"
    try:
        said = await output(("bash", "-c", script), folder)
    except CommandError as error:
        raise _refusal(name, model, f"its 'activate' script fails: {error}") from None
    lines = (line.partition("=") for line in said.split("\0") if "=" in line)
    found = {key: value for key, _, value in lines if key not in OF_THE_SHELL}
    return {key: value for key, value in found.items() if os.environ.get(key) != value}


async def _check(folder: Path, name: str, model: str) -> None:
    """Raise INVALID_ARG unless an environment of other origin can run a worker."""
    python = folder / "bin" / "python"
    if not python.exists():
        raise _refusal(name, model, "it has no bin/python")
    try:
        version = await output((python, "-c", PROBE), folder)
    except CommandError as error:
        raise _refusal(name, model, f"its Python cannot import numpy: {error}") from None
    found, oldest = version.strip(), ".".join(map(str, OLDEST))
    if not re.fullmatch(r"\d+\.\d+", found) or tuple(map(int, found.split("."))) < OLDEST:
        why = f"its bin/python is '{found[:80]}', expected Python {oldest} or later"
        raise _refusal(name, model, why)


def _refusal(name: str, model: str, why: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG, f"model '{model}': its environment '{name}' cannot be used: {why}"
    )
