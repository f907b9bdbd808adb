"""Messages that do not wait for an execution: pings and readiness."""

from pathlib import Path

import pytest

from backends.python.worker.sluice_worker.protocol import ToGateway, ToWorker
from tests.backends.python.worker.gateway import PlayedGateway, request, tensor, worker

READY = """
import asyncio, threading
go = threading.Event()

class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        if not go.wait(20):
            raise TimeoutError
        return [pb_utils.InferenceResponse([])]

    ASYNC def is_ready(self):
        go.set()
        RETURN
"""


@pytest.mark.parametrize("asynchronous", ["", "async"])
@pytest.mark.parametrize(
    ("body", "ready", "error"),
    [
        ("return True", True, None),
        ("return False", False, None),
        ("return 1", None, "is_ready() must return a boolean value"),
        ("raise ValueError('no')", None, "ValueError: no"),
    ],
)
def test_a_model_is_asked_whether_it_is_ready(
    tmp_path: Path, asynchronous: str, body: str, ready: bool | None, error: str | None
) -> None:
    text = READY.replace("RETURN", body).replace("ASYNC ", f"{asynchronous} ".lstrip())
    with worker(tmp_path, text) as gateway:
        gateway.say(ToWorker.IS_READY, 5)
        assert gateway.hear(ToGateway.READY).values == [5, ready, error]


def test_readiness_is_answered_while_execute_runs(tmp_path: Path) -> None:
    with worker(tmp_path, READY.replace("ASYNC ", "").replace("RETURN", "return True")) as gateway:
        header, data = tensor(1)
        gateway.begin(request(1, header), buffers=[data])
        gateway.say(ToWorker.IS_READY, 6)
        assert gateway.hear(ToGateway.READY).values == [6, True, None]
        assert gateway.executed()[0] is None


def test_a_load_reports_whether_the_model_has_is_ready(tmp_path: Path) -> None:
    for text, expected in ((READY, True), ("class TritonPythonModel:\n    pass\n", False)):
        code = text.replace("ASYNC ", "").replace("RETURN", "return True")
        with worker(tmp_path / str(expected), code) as gateway:
            assert gateway.loaded == {"checks_readiness": expected}


def test_a_worker_that_knows_no_model_answers_a_ping(probed: PlayedGateway) -> None:
    probed.ping()
