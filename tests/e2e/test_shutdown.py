"""Shutdown of a server while the real engine works."""

import time
from typing import Any

import pytest

from tests.e2e.conftest import EXIT_TIMEOUT_SECS
from tests.e2e.figures import IN_FLIGHT
from tests.e2e.llama import ENDLESS, events, every_engine, streamed
from tests.e2e.processes import Processes
from tests.raw import Connection
from tests.rpc import connected, streaming
from tests.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240), every_engine]

ENDED_SECS = 15.0
GENERATE = "/v2/models/llama/generate"
STORY = streamed("Once upon a time", **ENDLESS)
SHORT_TOKENS = 24
FEWEST_TOKENS = 4


def short_answer(tokens: int) -> dict[str, Any]:
    """A request for that number of tokens."""
    parameters = {"max_tokens": tokens, "ignore_eos": True}
    return {**STORY.body, "parameters": parameters, "return_finish_reason": True}


def tokens_of_a_second(server: Serving) -> int:
    """Tokens of a short answer; on a slow machine those that take a second alone."""
    with Connection(server.ports["http"]) as connection:
        began = time.monotonic()
        connection.ask(f"{GENERATE}_stream", short_answer(SHORT_TOKENS))
        assert events(connection.answer().body.decode())[-1]["finish_reason"] == "length"
        took_secs = time.monotonic() - began
    return max(FEWEST_TOKENS, min(SHORT_TOKENS, int(SHORT_TOKENS / took_secs)))


def test_at_the_end_short_answers_are_finished_and_long_ones_are_cut_with_an_error(
    ended_server: Serving,
) -> None:
    server = ended_server
    tokens = tokens_of_a_second(server)
    reason = "the server is shutting down and the request did not end within its "
    reason += f"--exit-timeout-secs of {EXIT_TIMEOUT_SECS}"
    with (
        Connection(server.ports["http"]) as short,
        Connection(server.ports["http"]) as long,
        Connection(server.ports["http"]) as whole,
        connected(server.grpc) as stub,
        streaming(stub) as rpc,
    ):
        processes = Processes(server)
        short.ask(f"{GENERATE}_stream", short_answer(tokens))
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
        assert [each.error_message for each in rpc.until_exit()][-1] == reason
        assert server.wait_ended() == 0
        assert time.monotonic() - began < ENDED_SECS
        assert processes.engines() == []
