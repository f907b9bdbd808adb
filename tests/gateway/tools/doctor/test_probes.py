"""Probes: every process has an outcome and ends."""

import os
import sys
from pathlib import Path

import pytest

from gateway.tools.doctor.probes import Outcome, ask
from tests.serving import wait_until

LIMIT_SECS = 30.0
ENDS: dict[str, str] = {
    "good": 'print(\'{"driver": "580"}\')',
    "refused": 'print(\'{"error": "no such thing"}\')',
    "crash": "import os; os.abort()",
    "raise": "raise SystemExit('libfoo.so: cannot open')",
}


def outcome(program: str, limit_secs: float = LIMIT_SECS) -> Outcome:
    answered: list[tuple[str, ...]] = []
    found = ask([("x",)], limit_secs, answered.append, (sys.executable, "-c", program))
    assert answered == [("x",)]
    return found[("x",)]


def test_a_probe_returns_its_result() -> None:
    found = outcome(ENDS["good"])
    assert (found.told, found.error) == ({"driver": "580"}, "")
    assert found.secs > 0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("refused", "no such thing"),
        ("crash", "crashes with SIGABRT: it says nothing"),
        ("raise", "fails with status 1: libfoo.so: cannot open"),
    ],
)
def test_a_failure_is_an_outcome(name: str, error: str) -> None:
    assert outcome(ENDS[name]).error == error


def test_one_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = (
        "import os, signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{child.pid}} {{os.getpid()}}')\n"
        "signal.pause()"
    )
    found = outcome(program, 3.0)
    assert found.error == "does not end within 3 s"
    assert not found.in_time
    started = [int(pid) for pid in pids.read_text().split()]
    wait_until(lambda: not any(map(is_running, started)), "all of them have ended")


def is_running(pid: int) -> bool:
    """A killed child of a killed process is a zombie until init looks at it."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_real_probe_keeps_what_libraries_print_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onnxruntime.py").write_text(
        "print('hello')\ndef get_available_providers(): return ['CPUExecutionProvider']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = ask([("onnxruntime",)], LIMIT_SECS, lambda _: None)[("onnxruntime",)]
    assert found.told == {"providers": ["CPUExecutionProvider"]}
