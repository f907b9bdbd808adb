"""Connections to a Ray cluster that cannot be made: each command ends with the reason."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_addresses import RayFleet, RayQuestion, RayTable
from tests.fleet.nodes import Fleet, RayNodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ENDS_SECS = 90.0
"""A command gives up after 30 s; its imports take seconds on a busy machine."""


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.60.0
    Python: 3.11.7
This process on node 10.0.0.5 was started with:
    Ray: 2.59.0
    Python: 3.11.7
"""


class HangingRay:
    """Ray, whose connection waits until the end of the test."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def init(self, **options: object) -> None:
        """Connect, without an end."""
        self.is_over.wait()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingRay]:
    from gateway.fleet import ray_state

    found = HangingRay()
    monkeypatch.setattr(ray_state, "ray", found)
    monkeypatch.setattr(ray_state, "CONNECT_SECS", 0.2)
    yield found
    found.is_over.set()


@pytest.mark.usefixtures("hanging")
@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"RAY_ADDRESS": "10.0.0.5:6379"}, "the head at 10.0.0.5:6379 (RAY_ADDRESS)"),
        ({}, "the head of this machine's cluster"),
    ],
    ids=["address", "none"],
)
def test_a_connection_without_an_answer_ends_with_what_was_tried_and_the_fix(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], place: str
) -> None:
    from gateway.fleet import ray_state

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InferenceError) as caught:
        ray_state.connect()
    assert caught.value.code is Code.UNAVAILABLE
    text = f"Ray cannot be used: {place} has not accepted this process for 0.2 s, expected a head"
    assert caught.value.message.startswith(text)
    assert "RAY_AUTH_TOKEN" in caught.value.message


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("Invalid address format: h"), "Invalid address format: h"),
        (ConnectionError("no cluster"), "no cluster"),
        (RuntimeError(MISMATCH), " ".join(MISMATCH.split())),
    ],
    ids=["address", "cluster", "version"],
)
def test_a_connection_that_ray_refuses_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    from gateway.fleet import ray_state

    def refuse(**options: object) -> None:
        raise error from RuntimeError("Traceback:\n  a line\nRpcError: wrong token\n")

    monkeypatch.setattr(ray_state, "ray", SimpleNamespace(init=refuse))
    with pytest.raises(InferenceError) as caught:
        ray_state.connect()
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message == f"Ray cannot be used: {reason}: RpcError: wrong token"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("\x1b[36mray::C.__init__()\x1b[39m\n  File x\nModuleNotFoundError: no 'm'\n", "no 'm'"),
        (MISMATCH, "Ray: 2.59.0 Python: 3.11.7"),
        ("timed out", "timed out"),
        ("", "RayError"),
    ],
    ids=["traceback", "lines", "line", "nothing"],
)
def test_an_error_of_ray_has_its_cause_on_one_line(text: str, cause: str) -> None:
    from ray.exceptions import RayError

    from gateway.fleet.ray_state import cause as cause_of

    found = cause_of(RayError(text))
    assert found.endswith(cause)
    assert "\n" not in found
    assert "\x1b" not in found


def test_an_error_of_ray_has_all_its_lines_up_to_a_bound() -> None:
    from gateway.fleet.ray_state import cause

    assert cause(RuntimeError(MISMATCH)) == " ".join(MISMATCH.split())
    found = cause(RuntimeError("first\n" + "word\n" * 10_000))
    assert found.startswith("first word word")
    assert len(found) < 2_000


@pytest.mark.parametrize(
    "text",
    [
        'Traceback:\n  File "x", in f\n    call()\n    ^^^^\n',
        "ray::A.f()\n  File x\nOSError: gone\n\nray::B.g()\n  File y\n    f()\n",
    ],
    ids=["one", "chained"],
)
def test_an_exception_has_all_its_paragraphs_and_no_traceback(text: str) -> None:
    from gateway.fleet.ray_state import cause

    found = cause(RuntimeError(f"{text}ValueError: no GPU\n\nExpected one:\n  run nvidia-smi\n"))
    assert found == "ValueError: no GPU Expected one: run nvidia-smi"


def test_a_traceback_without_an_exception_below_it_has_its_last_line() -> None:
    from gateway.fleet.ray_state import cause

    assert cause(RuntimeError("It was killed.\nIt died due to ray::x")) == "It died due to ray::x"


def test_a_router_gets_the_reason_of_a_cluster_that_does_not_say_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gateway.fleet import ray_directory, ray_state

    def gone() -> None:
        raise RuntimeError("GCS gone")

    monkeypatch.setattr(ray_state, "connect", lambda: None)
    monkeypatch.setattr(ray_state, "gcs", gone)
    monkeypatch.setattr(ray_directory.threading, "Thread", lambda **own: SimpleNamespace(start=int))
    tables = list(ray_directory._tables(RayQuestion(RayFleet("f"))))  # noqa: SLF001
    assert tables == [RayTable(reason="the state of the cluster does not answer: GCS gone")]


def test_news_that_the_controller_does_not_take_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from gateway.fleet import ray_cluster, ray_directory

    reasons = ["gone", "gone", "", "other"]

    def report(fleet: str, router: str, news: bytes) -> None:
        if reason := reasons.pop(0):
            raise InferenceError(Code.UNAVAILABLE, reason)

    def news() -> bytes:
        if not reasons:
            raise EOFError
        return b"{}"

    monkeypatch.setattr(ray_cluster, "report", report)
    with pytest.raises(EOFError):
        ray_directory._report("f", SimpleNamespace(get=news))  # type: ignore[arg-type]  # noqa: SLF001
    said = [(each.message, vars(each)["reason"]) for each in caplog.records]
    assert said == [("news not reported", "gone"), ("news not reported", "other")]


def test_a_wrong_token_a_silent_head_and_an_address_without_ray_end_each_command(
    nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as stack:
        # Connections are accepted by the kernel, as those of a head that is stopped.
        silent_at = f"127.0.0.1:{silent.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as closed:
            closed_at = f"127.0.0.1:{closed.getsockname()[1]}"
        began = {
            (address, action): stack.enter_context(Fleet("f", address).begun(action))
            for address in (silent_at, closed_at)
            for action in ("status", "down")
        }
        monkeypatch.setenv("RAY_AUTH_TOKEN", "another" * 8)
        own = {
            (nodes.address, action): stack.enter_context(Fleet("f", nodes.address).begun(action))
            for action in ("status", "down")
        }
        began |= own
        ends_at = time.monotonic() + ENDS_SECS
        for (address, action), process in began.items():
            _, errors = process.communicate(timeout=max(1.0, ends_at - time.monotonic()))
            assert process.returncode == 1, (address, action, errors)
            (said,) = [line for line in errors.splitlines() if line.startswith("sluice: ")]
            assert said.startswith("sluice: Ray cannot be used: ")
            assert address in said
            assert "Traceback" not in errors
