"""The command with runtimes that fail: the broken ones and the others are findings."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

BROKEN = {
    "vllm": "from nowhere import something",
    "torch": "import os; os.abort()",
    "onnxruntime": "raise ImportError('libonnx.so: cannot open shared object file')",
}
HEAVY = {"torch", "onnxruntime", "vllm", "numpy.f2py", "uvicorn", "fastapi", "grpc"}


def environment(folder: Path) -> Mapping[str, str]:
    for name, text in BROKEN.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.getcwd()}"}


def test_a_broken_part_is_one_finding_among_the_others(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "gateway", "doctor", "--json", "--limit-secs=50"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    told = json.loads(ended.stdout)
    found = {each["what"]: each for each in told["findings"] if each["part"] == "backends"}
    assert found["identity"]["verdict"] == "ok"
    assert {name: found[name]["verdict"] for name in ("onnxruntime", "pytorch", "vllm")} == {
        "onnxruntime": "broken",
        "pytorch": "broken",
        "vllm": "broken",
    }
    assert "SIGABRT" in found["pytorch"]["found"]
    assert "libonnx.so" in found["onnxruntime"]["found"]
    assert {each["part"] for each in told["findings"]} >= {"packages", "GPUs", "machine", "ports"}
    assert told["broken"] is True
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr + ended.stdout


def test_the_command_itself_imports_nothing_heavy() -> None:
    program = (
        "import sys; import gateway.cli, gateway.tools.doctor.command;"
        " print(*sys.modules, sep='\\n')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert HEAVY.isdisjoint(ended.stdout.split())
