"""A program's request that is cancelled by its id, from outside."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from gateway.errors import Code, InferenceError
from gateway.in_process.server import Server
from tests.gateway.in_process.conftest import in_flight, stopped_work
from tests.serving import WAIT_SECS, wait_until

ENDLESS = {"text_input": ["again"], "n": [2_000_000_000]}


@pytest.fixture
def server(models: Path) -> Iterator[Server]:
    with Server(model_repository=models, http_port=0, http_address="127.0.0.1") as server:
        yield server


def cancel(server: Server, model: str) -> int:
    """Cancel the request `a`; the status of the answer."""
    url = f"http://127.0.0.1:{server.ports['http']}/v2/models/{model}/requests/a/cancel"
    return httpx.post(url, timeout=WAIT_SECS).status_code


def test_the_last_response_of_several_says_so(server: Server) -> None:
    responses = server.model("repeat").infer(inputs=ENDLESS, request_id="a")
    assert not next(responses).final
    assert cancel(server, "repeat") == 200
    last = list(responses)[-1]
    assert (last.final, dict(last.outputs), last.parameters) == (True, {}, {"cancelled": True})
    wait_until(stopped_work(server, "repeat"), "the request is cancelled")


def test_a_request_with_one_response_is_an_error(server: Server) -> None:
    with ThreadPoolExecutor(1) as threads:
        inputs = {"x": np.ones(1, dtype=np.float32)}
        asking = threads.submit(
            lambda: server.model("slow").infer(inputs=inputs, request_id="a").only()
        )
        wait_until(lambda: in_flight(server.metrics(), "slow") == 1, "the request is there")
        assert cancel(server, "slow") == 200
        with pytest.raises(InferenceError) as caught:
            asking.result(WAIT_SECS)
    assert caught.value.code is Code.CANCELLED
    assert cancel(server, "slow") == 404
