"""A forest needs the library of its format only."""

import logging
import subprocess
import sys
from pathlib import Path

import lightgbm
import pytest

from backends.fil.model_file import read_forest
from tests.backends.fil.conftest import (
    LABELS,
    ROWS,
    checkpoint_of,
    config,
    json_of,
    lgb,
    save,
    text_of,
    xgb,
)

LIBGOMP = "libgomp.so.1: cannot open shared object file: No such file or directory"
ROOT = Path(__file__).parents[3]
LIBRARIES = ("lightgbm", "treelite", "xgboost")
FILES = {
    "lightgbm": ("model.txt", lambda: text_of(lgb("binary"))),
    "treelite": ("checkpoint.tl", lambda: checkpoint_of(xgb("binary:logistic"))),
    "xgboost": ("xgboost.json", lambda: json_of(xgb("binary:logistic"))),
}

PROGRAM = """
import sys
from pathlib import Path
from backends.fil.backend import FilBackend
from gateway.config import ModelConfig
from gateway.errors import InferenceError
try:
    FilBackend().complete(ModelConfig(name="m", backend="fil"), Path(sys.argv[1]))
except InferenceError as error:
    print(error.reason)
print([name for name in ("lightgbm", "treelite", "xgboost") if name in sys.modules])
"""


def printed(folder: Path, *before: Path) -> list[str]:
    """The output of a process that completes a config; its modules are first in `before`."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env={"PYTHONPATH": ":".join(map(str, (*before, ROOT)))},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return found.stdout.splitlines()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_file_imports_its_own_library_only(folder: Path, library: str) -> None:
    name, data = FILES[library]
    save({name: data()}, folder)
    assert printed(folder) == [str([library])]


@pytest.mark.parametrize(
    ("library", "raised", "reason"),
    [
        ("lightgbm", "OSError", f"{LIBGOMP}; on Debian and Ubuntu: apt-get install libgomp1"),
        ("treelite", "ImportError", f"{LIBGOMP}; on Debian and Ubuntu: apt-get install libgomp1"),
        ("xgboost", "ValueError", "not here; pip install 'sluice[fil]'"),
    ],
)
def test_a_library_that_cannot_be_imported_has_its_remedy(
    folder: Path, tmp_path: Path, library: str, raised: str, reason: str
) -> None:
    (tmp_path / "broken").mkdir()
    text = LIBGOMP if "libgomp" in reason else f"not\n{tmp_path}/here"
    (tmp_path / "broken" / f"{library}.py").write_text(f"raise {raised}({text!r})")
    name, data = FILES[library]
    save({name: data()}, folder)
    shown = {"lightgbm": "LightGBM", "xgboost": "XGBoost"}.get(library, library)
    assert printed(folder, tmp_path / "broken") == [
        f"Unavailable: unable to load model 'm': {shown} cannot be imported: {reason}",
        "[]",
    ]


def test_lines_of_lightgbm_are_lines_of_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    save({"model.txt": text_of(lgb("binary"))}, folder)
    read_forest(config(), folder, 1)
    caplog.set_level(logging.INFO, "sluice.fil")
    data = lightgbm.Dataset(ROWS, LABELS["binary"])
    lightgbm.train({"objective": "binary", "verbose": 1, "num_threads": 1}, data, 1)
    assert "[LightGBM] [Info]" in "".join(caplog.messages)
    assert "[LightGBM]" not in "".join(capfd.readouterr())
