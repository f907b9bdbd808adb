"""More requests than the real engine accepts."""

import time

import pytest

from tests.e2e.conftest import MAX_IN_FLIGHT
from tests.e2e.figures import IN_FLIGHT, changes, figures, wait_at_rest
from tests.e2e.llama import ENDLESS, FRANCE, Llama, every_engine, streamed
from tests.e2e.streams import crowd
from tests.rpc import connected, streaming
from tests.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240), every_engine]

AT_ONCE_SECS = 1.0
STORY = streamed("Once upon a time", **ENDLESS)


@pytest.mark.own_models("the limit of one process")
def test_a_model_refuses_requests_beyond_its_limit_at_once_and_serves_the_others(
    server: Serving, llama: Llama
) -> None:
    limit = f"model 'llama' has {MAX_IN_FLIGHT} requests in flight, the most it accepts"
    with changes(server) as change, crowd(server, STORY, MAX_IN_FLIGHT) as crowded:
        began = time.monotonic()
        answer = llama.post("/generate", FRANCE)
        with connected(server.grpc) as stub, streaming(stub) as rpc:
            rpc.ask(STORY.message)
            refusal = rpc.answer().error_message
        assert time.monotonic() - began < AT_ONCE_SECS
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert limit in answer.json()["error"]
        assert limit in refusal
        assert figures(server)[IN_FLIGHT] == MAX_IN_FLIGHT
        crowded.connections[0].head()
        assert crowded.connections[0].chunk()
    wait_at_rest(server)
    llama.expect_answer()
    assert change["REJECTED"] == len(("generate", "stream"))
