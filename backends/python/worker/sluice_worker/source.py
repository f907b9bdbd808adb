"""Import a model's file as Triton does."""

import importlib.util
import json
import os
import sys
import types
from typing import Any

from .errors import BadAnswer

DEFAULT = "model.py"


class Source:
    """Where a model's code is: in its version folder, or in that of a Python-based backend."""

    def __init__(self, model_config: str, version_folder: str, backend_folder: str) -> None:
        config = json.loads(model_config)
        self._version_folder, self._backend_folder = version_folder, backend_folder
        if backend_folder:
            self._name = str(config.get("runtime") or DEFAULT)
        else:
            self._name = str(config.get("default_model_filename") or DEFAULT)

    @property
    def shown(self) -> str:
        """The file as a client may read it: from the model's or the backend's folder on."""
        if self._backend_folder:
            return f"{os.path.basename(self._backend_folder)}/{self._name}"
        model_folder, version = os.path.split(self._version_folder)
        return f"{os.path.basename(model_folder)}/{version}/{self._name}"

    def python_model(self) -> Any:
        """The class `TritonPythonModel` of the file; whatever its import raises."""
        module = self._imported()
        try:
            return module.TritonPythonModel
        except AttributeError:
            raise AttributeError(
                f"module '{module.__name__}' has no attribute 'TritonPythonModel'"
            ) from None

    def _imported(self) -> types.ModuleType:
        if not self._name.endswith(".py"):
            raise BadAnswer(f"Model name must end with '.py'. Model name is \"{self._name}\".")
        path = os.path.join(self._backend_folder or self._version_folder, self._name)
        if not os.path.isfile(path):
            raise BadAnswer(f"Python model file not found in '{self.shown}'")
        self._extend_path()
        stem = self._name[: -len(".py")]
        if self._backend_folder:
            return _load(stem, path)
        version = os.path.basename(self._version_folder)
        _add_package(version, self._version_folder)
        return _load(f"{version}.{stem}", path)

    def _extend_path(self) -> None:
        """Append what Triton appends: the folders of version and model, and of the backend."""
        own = sys.path.pop(0)
        folders = [self._version_folder, os.path.dirname(self._version_folder), own]
        if self._backend_folder:
            folders.append(self._backend_folder)
        sys.path.extend(folders)


def _load(name: str, path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"'{name}' cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _add_package(name: str, folder: str) -> None:
    """Make `from . import sibling` work in a file of this folder."""
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules.setdefault(name, package)
