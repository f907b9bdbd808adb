"""The process of a part: every end has an outcome, and leaves no process."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

RUN = """
import json, os, pathlib, sys
from loadtests.gpu_check import check
from loadtests.gpu_check.parts import PARTS, Asked
from loadtests.support.servers import descendants

folder, program, limit = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
check.LOGS, check.STOP_SECS = folder, 0.5
asked = Asked(device="cpu", streams=[1], max_tokens=1, secs=0.1)
found = check.run_part(
    PARTS[0], asked, limit, os.environ, (sys.executable, "-c", program)
)
print(json.dumps({**found.as_json(), "left": list(descendants(os.getpid()))}))
"""
ANSWERING = """
import json, sys
name, asked, answer = sys.argv[1:]
told = {"part": name, "status": "passed", "reason": "", "secs": 1.0, "rows": []}
assert json.loads(asked)["device"] == "cpu"
open(answer, "w").write(json.dumps(told))
"""
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
print("began", flush=True)
signal.pause()
"""


def run(folder: Path, program: str, limit_secs: float = 30.0) -> dict[str, Any]:
    """In a process of its own, because it adopts what others leave behind."""
    ended = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), textwrap.dedent(program), str(limit_secs)],
        capture_output=True,
        text=True,
        check=True,
    )
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def test_a_part_that_answers_is_believed(tmp_path: Path) -> None:
    found = run(tmp_path, ANSWERING)
    assert (found["status"], found["part"], found["left"]) == ("passed", "pytorch", [])


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.abort()", "it crashed with SIGABRT"),
        ("raise SystemExit('libcudnn is missing')", "it ended with status 1"),
    ],
)
def test_a_part_that_does_not_answer_has_failed(tmp_path: Path, program: str, reason: str) -> None:
    found = run(tmp_path, program)
    assert found["status"] == "failed"
    assert found["reason"].startswith(reason)
    assert ("libcudnn is missing" in found["reason"]) == ("libcudnn" in program)


def test_one_that_takes_too_long_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    found = run(tmp_path, STUBBORN, 3.0)
    assert found["status"] == "failed"
    assert found["reason"].startswith("not done within 3 s")
    assert "began" in found["reason"]
    assert found["left"] == []
