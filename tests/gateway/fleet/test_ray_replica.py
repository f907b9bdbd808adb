"""The process of a replica on Ray, without Ray: its need, and its end with its actor."""

import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from gateway.fleet import ray_replica
from gateway.fleet.ray_replica import KEPT_SECS, MODULE, NeedPage, ReplicaProcess
from gateway.fleet.ray_views import ReplicaPhase, ReplicaView
from gateway.processes.module_commands import module_command, module_environment
from tests.conformance.models import REPEAT
from tests.serving import WAIT_SECS, wait_until, write_model

PAGE = """# TYPE gateway_fleet_need gauge
gateway_fleet_need{model="a",version="1"} 0.25
gateway_fleet_need{model="b",version="1"} 2.5
"""


class Pages:
    """A metrics page at a port, with the text and the status that the test says."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.text = PAGE
        self.status = HTTPStatus.OK


@pytest.fixture
def pages() -> Iterator[Pages]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(found.status)
            self.end_headers()
            self.wfile.write(found.text.encode())

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        found = Pages(server.server_port)
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def test_the_need_is_the_largest_one_and_asked_without_a_proxy(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert NeedPage("m").need(pages.port) == 2.5


def broken(pages: Pages) -> None:
    pages.status = HTTPStatus.BAD_GATEWAY


def foreign(pages: Pages) -> None:
    pages.text = "<html>"


@pytest.mark.parametrize(
    ("change", "reason"), [(broken, "HTTP Error 502: Bad Gateway"), (foreign, "no need in it")]
)
def test_the_last_need_holds_for_a_minute_without_a_page_which_is_logged_once(
    pages: Pages, caplog: pytest.LogCaptureFixture, change: Callable[[Pages], None], reason: str
) -> None:
    now = 0.0
    page = NeedPage("m", lambda: now)
    page.need(pages.port)
    change(pages)
    with caplog.at_level(logging.WARNING):
        assert page.need(pages.port) == 2.5
        now = KEPT_SECS
        assert page.need(pages.port) == 0.0
    said = [(each.message, vars(each)["model"], vars(each)["reason"]) for each in caplog.records]
    assert said == [("metrics page not read", "m", reason)]


def test_a_replica_that_is_too_busy_to_answer_is_fully_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_replica, "METRICS_SECS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert NeedPage("m").need(busy.getsockname()[1]) == 1.0


class LoadedChild:
    """A child process that is ready."""

    def __init__(self, *command: object, **options: object) -> None:
        self.stderr = ["   fleet 127.0.0.1:7\n", "metrics 127.0.0.1:9\n"]

    def poll(self) -> None:
        """It has not ended."""


@pytest.mark.parametrize(
    ("refusals", "phases"),
    [
        (["", ""], [ReplicaPhase.READY] * 2),
        (["", "other files"], [ReplicaPhase.ENDED] * 2),
        (["other files"], [ReplicaPhase.ENDED] * 2),
    ],
    ids=["equal", "changed", "other"],
)
def test_a_replica_ends_if_its_files_are_others_before_it_begins_or_once_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, refusals: list[str], phases: list[ReplicaPhase]
) -> None:
    monkeypatch.setattr(ray_replica.subprocess, "Popen", LoadedChild)
    view = ReplicaView(name="r", model="m", phase=ReplicaPhase.STARTING, host="127.0.0.1")
    last = refusals[-1]
    replica = ReplicaProcess(view, (), {}, lambda: refusals.pop(0))
    wait_until(lambda: replica.view().phase is not ReplicaPhase.STARTING, "it is ready")
    found = [replica.view() for _ in phases]
    assert [each.phase for each in found] == phases
    assert [each.reason for each in found] == [last] * len(found)
    assert refusals == []


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["E loading", "sluice: failed to load all models:", "  m version 1: no backend 'x'"],
            "it ended with status 1: failed to load all models: m version 1: no backend 'x'",
        ),
        (
            ["E loading", "sluice: failed to load all models:", *map("  {}: bad".format, range(9))],
            "it ended with status 1: failed to load all models: "
            + " ".join(map("{}: bad".format, range(9))),
        ),
        (
            ["sluice: said by a model", "I loading", f"sluice: {'x' * 9999}", *["  y"] * 9999],
            f"it ended with status 1: {'x' * (512 - len('sluice: '))}... " + " ".join("y" * 19),
        ),
        (
            ["sluice: failed:", "  m: no memory", "Traceback:", "  File x", "E a request"],
            "it ended with status 1: failed: m: no memory\nTraceback:\n  File x\nE a request",
        ),
        (
            ["Traceback:", '  File "/srv/m.py"', "OSError: gone"],
            'it ended with status 1\nTraceback:\n  File "/srv/m.py"\nOSError: gone',
        ),
    ],
    ids=["error", "long", "endless", "log-after-it", "log"],
)
def test_the_reason_of_an_end_is_the_error_of_the_command_or_else_the_log_below_the_status(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], reason: str
) -> None:
    class EndedChild:
        returncode = 1

        def __init__(self, *command: object, **options: object) -> None:
            self.stderr = [f"{each}\n" for each in lines]

        def poll(self) -> int:
            return self.returncode

    monkeypatch.setattr(ray_replica.subprocess, "Popen", EndedChild)
    view = ReplicaView(name="r", model="m", phase=ReplicaPhase.STARTING)
    replica = ReplicaProcess(view, (), {}, lambda: "")
    found = replica.view()
    assert (found.phase, found.reason) == (ReplicaPhase.ENDED, reason)


def test_the_error_of_a_model_that_does_not_load_has_no_advice_that_ray_refuses(
    tmp_path: Path,
) -> None:
    write_model(tmp_path, "m", REPEAT.replace("repeat", "none"))
    own = ("--fleet-address=127.0.0.1", "--fleet-port=0", "--left-out={}")
    ended = subprocess.run(
        module_command("gateway", "replica", "m", f"--model-repository={tmp_path}", *own),
        capture_output=True,
        text=True,
        env=module_environment(),
        timeout=WAIT_SECS,
    )
    assert ended.returncode == 1
    assert "sluice: failed to load all models:\n  m" in ended.stderr
    assert "exit-on-error" not in ended.stderr


HANGING = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stderr.write("fleet 127.0.0.1:7\\nmetrics 127.0.0.1:9\\n")
sys.stderr.flush()
time.sleep(600)
"""


def test_a_draining_replica_that_hangs_is_killed_after_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = ReplicaView(name="r", model="m", phase=ReplicaPhase.STARTING, host="127.0.0.1")
    with subprocess.Popen(
        [sys.executable, "-c", HANGING], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        monkeypatch.setattr(ray_replica.subprocess, "Popen", lambda *own, **others: child)
        monkeypatch.setattr(ray_replica, "KILL_SECS", 0.5)
        replica = ReplicaProcess(view, ("--exit-timeout-secs=0.5",), {}, lambda: "")
        wait_until(lambda: replica.view().phase is ReplicaPhase.READY, "it is ready")
        began_at = time.monotonic()
        replica.drain()
        assert replica.view().phase is ReplicaPhase.DRAINING
        wait_until(lambda: replica.view().phase is ReplicaPhase.ENDED, "it is killed")
        assert time.monotonic() - began_at >= 1
        assert replica.view().reason == f"it ended with status -{signal.SIGKILL:d}"


def test_a_replica_ends_with_its_actor(tmp_path: Path) -> None:
    write_model(tmp_path, "m", REPEAT)
    options = (f"--model-repository={tmp_path}", "--fleet-address=127.0.0.1", "--fleet-port=0")
    with subprocess.Popen(
        module_command(MODULE, "replica", "m", *options),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=module_environment(),
    ) as replica:
        assert replica.stdin is not None
        assert replica.stderr is not None
        assert any(line.split()[:1] == [b"fleet"] for line in replica.stderr)
        assert replica.poll() is None
        replica.stdin.close()
        try:
            assert replica.wait(WAIT_SECS) == 1
        finally:
            replica.kill()
