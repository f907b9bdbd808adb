"""The engine's worker is killed: it is started again, and nothing of it is left."""

import os
import signal
import subprocess

import httpx
import pytest

from tests.children import command
from tests.e2e.llama import Llama
from tests.serving import Serving, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_an_engine_that_is_killed_under_load_is_started_again(
    server: Serving, llama: Llama
) -> None:
    sampling = {"max_tokens": 1500, "ignore_eos": True}
    body = {"text_input": "Once", "stream": True, "parameters": sampling}
    url = f"{server.http}/v2/models/llama/generate_stream"
    restarts = restarts_of(server)
    with httpx.stream("POST", url, json=body, timeout=60) as answered:
        lines = answered.iter_lines()
        next(lines)
        for worker in children(server.process.pid, b"backends/python/worker"):
            os.kill(worker, signal.SIGKILL)
        assert any("its worker process ended: it was ended by SIGKILL" in line for line in lines)
    wait_restarted(server, restarts)
    llama.expect_answer()


def test_the_process_that_checks_structures_ends_with_its_worker(
    server: Serving, llama: Llama
) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-c]{3}"}
    llama.generate(text_input="Once", parameters=guide)
    (worker,) = children(server.process.pid, b"backends/python/worker")
    (check,) = children(worker, b"sluice_openvino_genai.compiling")
    restarts = restarts_of(server)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not command(check), "the process that checks structures has ended")
    wait_restarted(server, restarts)
    llama.expect_answer()


def restarts_of(server: Serving) -> int:
    """The restarts that the log has so far."""
    return sum("instance restarted" in line for line in server.log)


def wait_restarted(server: Serving, before: int) -> None:
    """Wait until the log has one more restart than `before`."""
    wait_until(lambda: restarts_of(server) > before, "the worker is started again", 60)


def children(process: int, name: bytes) -> list[int]:
    """The children of a process whose command has the name."""
    listed = ["pgrep", "-P", str(process)]  # its status is 1 if there are none
    found = subprocess.run(listed, capture_output=True, text=True, check=False).stdout
    return [int(child) for child in found.split() if name in command(int(child))]
