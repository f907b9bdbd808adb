"""A client's process ends with the server, also when that is gone before they have spoken."""

import os
import socket
import subprocess
import sys

from backends.vllm.orphans import EXIT_CODE

MODULE = "backends.vllm.engine_clients"
ENDED_SECS = 60.0
"""It imports all of vLLM first."""


def exit_code(server: int) -> int:
    """Of a client that has been started by this process and hears nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", MODULE, str(theirs.fileno()), str(server)]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
    try:
        return process.wait(ENDED_SECS)
    finally:
        process.kill()


def test_a_client_ends_whose_connection_ends_before_it_is_told_anything() -> None:
    assert exit_code(os.getpid()) == 0


def test_a_client_ends_whose_server_is_gone_before_it_can_look() -> None:
    assert exit_code(os.getppid()) == EXIT_CODE
