"""The processes of a server, by /proc, and its ports."""

import os
import subprocess
import sys
import time
from pathlib import Path

from loadtests.support.servers import (
    CLIENT_PORTS,
    cpu_secs,
    descendants,
    free_ports,
    is_running,
    name_of,
    open_files,
    resident_bytes,
    spending,
)


def test_descendants_are_found_with_their_names() -> None:
    program = (
        "import subprocess, sys\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(inner.pid, flush=True)\n"
        "input()\n"
        "inner.communicate(b'\\n')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as outer:
        assert outer.stdout is not None
        inner = int(outer.stdout.readline())
        assert list(descendants(outer.pid)) == [inner]
        assert {outer.pid, inner} <= set(descendants(os.getpid()))
        assert name_of(inner).startswith("python")
        outer.communicate("\n")
    assert name_of(inner) == ""


def test_a_process_that_has_ended_has_no_figures() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert not is_running(ended.pid)
    assert (cpu_secs(ended.pid), resident_bytes(ended.pid)) == (0, 0)


def test_a_running_process_has_processor_time_memory_and_open_files() -> None:
    mine = os.getpid()
    before = open_files(mine)
    with Path(os.devnull).open():
        assert open_files(mine) == before + 1
    assert is_running(mine)
    assert resident_bytes(mine) > 1 << 20
    assert 0 < cpu_secs(mine) <= os.times().elapsed


def test_processor_time_is_that_of_the_block() -> None:
    with spending(os.getpid()) as spent:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            """Take processor time."""
    assert spent.secs >= 0.03


def test_free_ports_are_none_that_a_client_gets_meanwhile() -> None:
    first = int(CLIENT_PORTS.read_text().split()[0])
    found = free_ports()
    ports = {found.http, found.grpc, found.metrics}
    assert len(ports) == 3
    assert max(ports) < first
