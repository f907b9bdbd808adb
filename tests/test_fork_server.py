"""Servers of tests that are forks: no test passes because of what a fork has imported."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.child_forks import FRONTEND
from tests.children import frontends_of
from tests.fork_server import PRELOADED, ROOT, fresh
from tests.forked_children import children_fork
from tests.serving import WAIT_SECS, Serving, http_get, running, wait_until, write_model

IMPORTED = re.compile(r"^import time:.*\| +(\S+)$", re.MULTILINE)
FORKING = {"tests", "tests.child_forks", "tests.fork_server"}
"""The modules that fork: a server imports nothing of the tests."""
PROFILED = {"PYTHONPROFILEIMPORTTIME": "1"}
"""With it an interpreter tells at its start what it imports."""
MODEL = 'backend: "python" input { name: "x" data_type: TYPE_FP32 dims: 1 } ' + (
    'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
)
PROGRAM = """
print("the worker runs")

class TritonPythonModel:
    def execute(self, requests):
        return []
"""
AGREED = """
from gateway.config.pbtxt import parse, to_text
from gateway.fleet.offers import ModelOffer
from gateway.fleet.keys import PrefixScope, rendezvous
from gateway.fleet.prompts import keys_of_fleet

config = 'name: "m" backend: "b"' + "".join(
    f' parameters {{ key: "{key}" value: {{ string_value: "1" }} }}' for key in "abcdefgh"
)
labels = {name: ("x", "y") for name in set("abcdefgh")}
keys = keys_of_fleet("sluice", b"")
print(
    rendezvous(b"pin", set("abcdefgh")),
    ModelOffer("m", 1, to_text(parse(config, "m")), labels, (), 0, "").digests,
    keys.of_text(PrefixScope(model="m", version="1"), "a" * 600),
    keys.of_pin("conversation", "m", "name"),
)
"""
"""Values that all processes of a fleet must agree on."""


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
    with running(Serving(tmp_path, environment=PROFILED, start=fresh)) as server:
        pass
    imported = IMPORTED.findall(server.text)
    assert len(imported) > len(PRELOADED)
    assert set(IMPORTED.findall(preloading.stderr)) - set(imported) == FORKING


def test_frontends_and_workers_of_a_forked_server_are_forks(tmp_path: Path) -> None:
    write_model(tmp_path, "m", MODEL)
    (tmp_path / "m" / "1" / "model.py").write_text(PROGRAM)
    with running(Serving(tmp_path, ["--frontends=1"], environment=PROFILED)) as server:
        server.wait_logged("the worker runs")
        wait_until(lambda: len(frontends_of(server.process.pid)) == 1, "the frontend runs")
        assert http_get(server.ports["http"], "/v2/models/m/ready")[0] == 200
    assert "import time:" not in server.text


def test_a_fork_of_this_process_ends_with_its_program_and_runs_no_other_test() -> None:
    ours, theirs = socket.socketpair()
    with children_fork(), theirs:
        command = [sys.executable, *FRONTEND, str(theirs.fileno())]
        frontend = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=dict(os.environ))
    ours.close()
    assert frontend.wait(WAIT_SECS) == 0


def test_processes_with_other_hashes_agree_on_replicas_models_and_keys() -> None:
    """Forks have one seed of `hash`, but the processes of a fleet have different ones."""
    found = {
        subprocess.run(
            [sys.executable, "-c", AGREED],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
