"""Imports of OpenVINO by the backends that use it ask for no host, and write nothing at home."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import socket
import sys

def refuse(host, *_, **__):
    print("asked for", host, flush=True)
    raise OSError("no network")

socket.getaddrinfo = refuse
{imports}
print(sys.modules["openvino"].__name__)
"""
WORKER = """
sys.path[:0] = ["backends/python/worker", "backends/openvino_genai/worker"]
from sluice_openvino_genai.engine import import_library
import_library()
"""
OF_CI = ("CI", "TF_BUILD", "JENKINS_URL")
"""Environment variables that disable the library's reports."""


@pytest.mark.parametrize(
    "imports", ["import backends.openvino.backend", WORKER], ids=["openvino", "openvino_genai"]
)
def test_an_import_reports_nothing(tmp_path: Path, imports: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in OF_CI}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports)],
        env={**kept, "HOME": str(tmp_path), "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("openvino\n", 0), done.stderr
    assert not list(tmp_path.iterdir())
