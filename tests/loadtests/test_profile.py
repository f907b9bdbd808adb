"""`make profile`: a flame graph of a running server."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.serving import ROOT

NO_PERMISSION = "Permission"


@pytest.mark.timeout(120)
def test_a_profile_of_streams_is_a_flame_graph_of_the_servers_functions(tmp_path: Path) -> None:
    target = tmp_path / "stream.svg"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "loadtests", "profile", "--path", "stream", "--secs", "1"),
            *("--clients", "1", "--output", str(target)),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    if NO_PERMISSION in ended.stderr + ended.stdout:
        needs.lacking("permission to trace processes", "run as root, or allow ptrace")
    assert ended.returncode == 0, ended.stderr
    drawn = target.read_text()
    assert "<svg" in drawn
    assert "gateway/frontends/http" in drawn
