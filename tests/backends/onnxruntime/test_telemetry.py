"""A session of the backend reports nothing to the makers of its library."""

import os
import subprocess
import sys
from pathlib import Path

from tests.onnx_models import add_sub, save

PROGRAM = """
import sys
from backends.onnxruntime.library import onnxruntime

onnxruntime.InferenceSession(sys.argv[1])
"""
SWITCH = "ORT_DISABLE_TELEMETRY"
OF_CI = ("CI", "TF_BUILD", "JENKINS_URL", "GITHUB_ACTIONS")
"""Environment variables that might disable the library's reports."""


def written(model: Path, home: Path, **variables: str) -> list[Path]:
    """The files of a session in the user's folder, where the library stores its reports."""
    kept = {name: value for name, value in os.environ.items() if name not in (*OF_CI, SWITCH)}
    folders = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "PYTHONPATH": os.getcwd()}
    program = [sys.executable, "-B", "-c", PROGRAM, str(model)]
    subprocess.run(program, env={**kept, **folders, **variables}, check=True, capture_output=True)
    return list(home.iterdir())


def test_a_session_stores_no_report(tmp_path: Path) -> None:
    model = save(add_sub(), tmp_path) / "model.onnx"
    home = tmp_path / "home"
    home.mkdir()
    assert not written(model, home)
    assert written(model, home, **{SWITCH: "0"}), "the library has other places for its reports"
