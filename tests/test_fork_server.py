"""Servers of tests that are forks: no test passes because of what a fork has imported."""

import re
import subprocess
import sys
from pathlib import Path

from tests.fork_server import PRELOADED, ROOT, fresh
from tests.serving import Serving, running

IMPORTED = re.compile(r"^import time:.*\| +(gateway\S*)$", re.MULTILINE)


def test_a_fork_has_imported_nothing_but_what_a_server_imports_at_its_start(
    tmp_path: Path,
) -> None:
    program = "from tests.fork_server import preload; preload()"
    preloading = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    profiled = {"PYTHONPROFILEIMPORTTIME": "1"}
    with running(Serving(tmp_path, environment=profiled, start=fresh)) as server:
        pass
    imported = IMPORTED.findall(server.text)
    assert len(imported) > len(PRELOADED)
    assert set(IMPORTED.findall(preloading.stderr)) - set(imported) == set()
