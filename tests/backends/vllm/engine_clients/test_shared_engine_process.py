"""A client's process ends with the server, also when that is gone before they have spoken."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from backends.vllm.engine_clients.shared_engine import MODULE
from backends.vllm.engine_processes import EXIT_CODE
from gateway.processes.module_commands import module_command, module_environment

ENDED_SECS = 60.0
"""It imports all of vLLM first."""


def exit_code(server: int, folder: Path) -> int:
    """Of a client that has been started by this process and hears nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = module_command(MODULE, str(theirs.fileno()), str(server))
        process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=module_environment(), cwd=folder
        )
    try:
        return process.wait(ENDED_SECS)
    finally:
        process.kill()


def test_a_client_ends_whose_server_is_gone_before_it_can_look(tmp_path: Path) -> None:
    assert exit_code(os.getppid(), tmp_path) == EXIT_CODE


@pytest.mark.release
def test_a_client_exits_with_its_connection_and_imports_no_file_of_the_working_directory(
    tmp_path: Path,
) -> None:
    """Its connection ends before the first message."""
    (tmp_path / "gateway").mkdir()
    for name in ("json.py", "uvloop.py", "gateway/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the working directory')")
    assert exit_code(os.getpid(), tmp_path) == 0
