"""More than the real model may take on, and a server that is told to end while it works."""

import time
from pathlib import Path

import pytest

from tests.e2e.conftest import MAX_IN_FLIGHT
from tests.e2e.figures import IN_FLIGHT, changes, figures, wait_at_rest
from tests.e2e.llama import ENDLESS, FRANCE, Llama, events, streamed, write_llama
from tests.e2e.processes import Processes
from tests.e2e.streams import crowd
from tests.raw import Connection
from tests.rpc import connected, streaming
from tests.serving import Serving, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

AT_ONCE_SECS = 1.0
EXIT_TIMEOUT_SECS = 3
ENDED_SECS = 15.0
GENERATE = "/v2/models/llama/generate"
STORY = streamed("Once upon a time", **ENDLESS)
SHORT = {**STORY.body, "parameters": {"max_tokens": 24, "ignore_eos": True}}


def test_beyond_its_limit_a_model_refuses_at_once_and_goes_on(
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
    wait_at_rest(server, AT_ONCE_SECS)
    llama.expect_answer()
    assert change["REJECTED"] == len(("generate", "stream"))


def test_at_the_end_short_answers_are_finished_and_long_ones_are_cut_with_an_error(
    stored_model: Path, tmp_path: Path
) -> None:
    write_llama(tmp_path)
    reason = "the server is shutting down and the request did not end within its "
    reason += f"--exit-timeout-secs of {EXIT_TIMEOUT_SECS}"
    with (
        serving(tmp_path, f"--exit-timeout-secs={EXIT_TIMEOUT_SECS}") as server,
        Connection(server.ports["http"]) as short,
        Connection(server.ports["http"]) as long,
        Connection(server.ports["http"]) as whole,
        connected(server.grpc) as stub,
        streaming(stub) as rpc,
    ):
        processes = Processes(server)
        short.ask(f"{GENERATE}_stream", {**SHORT, "return_finish_reason": True})
        long.ask(f"{GENERATE}_stream", STORY.body)
        whole.ask(GENERATE, {**STORY.body, "stream": False})
        rpc.ask(STORY.message)
        server.wait_metric(IN_FLIGHT, "llama", 4)
        server.begin_stop()
        began = time.monotonic()
        assert events(short.answer().body.decode())[-1]["finish_reason"] == "length"
        assert events(long.answer().body.decode())[-1] == {"error": reason}
        answer = whole.answer()
        assert (answer.status, answer.json) == (503, {"error": reason})
        assert [each.error_message for each in rpc.rest()][-1] == reason
        assert server.wait_ended() == 0
        assert time.monotonic() - began < ENDED_SECS
        assert processes.engines() == []
