"""Files of estimators are loaded, or refused with the reason."""

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn.base import BaseEstimator
from sklearn.preprocessing import FunctionTransformer

from tests.backends.python.worker.gateway import WORKER
from tests.backends.sklearn.conftest import ROWS, OwnScaler, Program, Save
from tests.serving import ROOT


@pytest.fixture(autouse=True)
def path_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load changes the search path of its process."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def with_text(file: Path, old: str, new: str) -> None:
    """Replace a text in the description of a `.skops` file."""
    with zipfile.ZipFile(file) as found:
        members = {name: found.read(name) for name in found.namelist()}
    members["schema.json"] = members["schema.json"].decode().replace(old, new).encode()
    with zipfile.ZipFile(file, "w") as made:
        for name, content in members.items():
            made.writestr(name, content)


@pytest.mark.parametrize("suffix", ["skops", "joblib", "pkl", "pickle"])
@pytest.mark.parametrize("name", ["logistic", "forest", "boosting", "neighbours"])
def test_an_estimator_is_loaded(
    program: Program, estimators: Mapping[str, Any], save: Save, name: str, suffix: str
) -> None:
    estimator = estimators[name]
    file = f"model.{suffix}"
    loaded = program.saved(save(estimator, file), name=file)
    assert loaded.predict(ROWS).tolist() == estimator.predict(ROWS).tolist()


def test_types_that_are_not_trusted_are_named(program: Program, save: Save) -> None:
    folder = save(OwnScaler(3.0))
    with pytest.raises(Exception, match="not trusted") as refusal:
        program.saved(folder)
    own = f"{OwnScaler.__module__}.OwnScaler"
    assert str(refusal.value) == (
        f"model 'm': 'model.skops' holds types that are not trusted: {own}; list them in the "
        "parameter 'trusted_types' if you know its origin"
    )
    assert refusal.value.code == "INVALID_ARG"
    assert program.saved(folder, f"a.B, {own}").factor == 3.0


def test_a_function_is_not_trusted(program: Program, save: Save) -> None:
    with pytest.raises(Exception, match=r"not trusted: numpy\.load; list them"):
        program.saved(save(FunctionTransformer(np.load)))


def test_every_trusted_type_exists(program: Program) -> None:
    trusted = sys.modules["sluice_sklearn.trusted_types"].TRUSTED
    for each in trusted - set(skipped(trusted)):
        module, _, name = each.rpartition(".")
        __import__(module)
        assert isinstance(getattr(sys.modules[module], name), type), each


def skipped(trusted: frozenset[str]) -> list[str]:
    """Names without a number of bits, which some releases have."""
    return [each for each in trusted if re.search(r"_dist_metrics\.\w+Distance$", each)]


@pytest.mark.parametrize("name", ["model.skops", "model.joblib"])
def test_another_version_of_scikit_learn_is_an_error_with_both(
    program: Program,
    estimators: Mapping[str, Any],
    save: Save,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    with monkeypatch.context() as then:
        then.setattr("sklearn.base.__version__", "1.5.2")
        folder = save(estimators["logistic"], name)
    here = sklearn.__version__
    with pytest.raises(Exception, match="was saved by") as refusal:
        program.saved(folder, name=name)
    assert str(refusal.value) == (
        f"model 'm': '{name}' was saved by scikit-learn 1.5.2, but its environment has {here}: "
        f"save it by {here}, or write scikit-learn==1.5.2 in the model's requirements.txt"
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "BadZipFile: File is not a zip file"),
        (b"\x80\x05N.", "BadZipFile: File is not a zip file"),
        (None, "BadZipFile: File is not a zip file"),
    ],
)
def test_a_broken_file_is_one_line(
    program: Program, estimators: Mapping[str, Any], save: Save, content: bytes | None, text: str
) -> None:
    folder = save(estimators["scaler"])
    file = folder / "model.skops"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(Exception, match=text) as refusal:
        program.saved(folder)
    assert str(refusal.value) == f"model 'm': 'model.skops' cannot be loaded: {text}"


def test_an_archive_of_something_else_is_refused(program: Program, save: Save) -> None:
    folder = save(OwnScaler())
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        made.writestr("a.txt", json.dumps({}))
    (folder / "model.skops").write_bytes(content.getvalue())
    with pytest.raises(Exception, match=r"cannot be loaded: KeyError: .*'schema\.json'"):
        program.saved(folder)


class Raising:
    """Its pickle raises when it is loaded."""

    def __reduce__(self) -> Any:
        return os.listdir, ("/no such/folder of this host",)


class Exiting:
    """Its pickle calls `sys.exit`."""

    def __reduce__(self) -> Any:
        return sys.exit, ("first\nsecond",)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Raising(), "FileNotFoundError: [Errno 2] No such file or directory: '<path>'"),
        (Exiting(), "SystemExit: first"),
    ],
)
def test_a_pickle_that_raises_is_one_line_without_paths(
    program: Program, save: Save, made: Any, text: str
) -> None:
    with pytest.raises(Exception, match="cannot be loaded") as refusal:
        program.saved(save(made, "model.pkl"), name="model.pkl")
    assert str(refusal.value) == f"model 'm': 'model.pkl' cannot be loaded: {text}"


class Unknown(BaseEstimator):
    """Its module is renamed in the file."""


def test_a_missing_module_of_a_trusted_type_is_named(program: Program, save: Save) -> None:
    folder = save(Unknown())
    with_text(folder / "model.skops", Unknown.__module__, "not_there")
    with pytest.raises(Exception, match="ModuleNotFoundError: No module named 'not_there'"):
        program.saved(folder, "not_there.Unknown")


ALONE = """
import sys
sys.path[:0] = {folders}
sys.path += {model}
sys.modules["{hidden}"] = None
from pathlib import Path
from sluice_sklearn.estimator_file import EstimatorFile
config = {{"name": "m", "default_model_filename": "model.skops"}}
try:
    EstimatorFile(config, Path({model}[0])).load()
except Exception as error:
    print(error)
else:
    print("loaded")
"""


def alone(folder: Path, hidden: str) -> str:
    """The outcome of a load in a process of its own, in which one module is missing."""
    folders = [str(WORKER), str(ROOT / "backends" / "sklearn" / "worker")]
    code = ALONE.format(folders=folders, model=[str(folder), str(folder.parent)], hidden=hidden)
    command = [sys.executable, "-W", "ignore", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return ended.stdout.strip()


def test_a_missing_package_is_named_with_the_way_to_get_it(save: Save) -> None:
    assert alone(save(FunctionTransformer()), "skops") == (
        "model 'm': its environment has no package 'skops.io'; pip install 'sluice[sklearn]', or "
        "add it to the model's requirements.txt"
    )


def test_a_module_in_the_models_folder_stands_in_for_none_of_the_libraries(save: Save) -> None:
    folder = save(FunctionTransformer())
    for place in (folder, folder.parent):
        (place / "quantile_forest.py").write_text("print('ran')\n")
    assert alone(folder, "not_there") == "loaded"
