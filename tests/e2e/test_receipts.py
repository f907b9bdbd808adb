"""Receipts of requests to the real engine: its own stamps, on every door and of several texts."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MAX_RUNNING
from tests.e2e.figures import IN_FLIGHT
from tests.e2e.llama import ENDLESS, streamed
from tests.e2e.streams import crowd
from tests.raw import Connection
from tests.serving import Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

ENGINE = ["tokenize", "engine_queue", "prefill", "generate", "detokenize"]
CHAT: dict[str, Any] = {
    "model": "llama",
    "messages": [{"role": "user", "content": "Tell a story."}],
    "max_tokens": 16,
    "stream": True,
    "timing": True,
}
GENERATE: dict[str, Any] = {"text_input": "Once", "max_tokens": 16, "stream": True, "timing": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/llama/generate_stream", GENERATE),
        ("/v2/models/llama/generate_stream", {**GENERATE, "n": 2, "stream": False}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    ],
    ids=["a text", "two texts", "a chat", "a chat with usage"],
)
def test_the_parts_of_the_engine_are_its_own_stamps(
    server: Serving, path: str, body: dict[str, Any]
) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.ask(path, body)
        found = connection.answer()
    events = [each for each in found.body.split(b"\n\n") if each.startswith(b"data: {")]
    assert found.status == 200, found.body
    timings = [json.loads(each.removeprefix(b"data: ")).get("timing") for each in events]
    assert [each is not None for each in timings] == [*[False] * (len(events) - 1), True]
    timing = timings[-1]
    stall = timing.pop("stall", 0.0)  # on a busy machine a write may take a millisecond
    assert list(timing) == ["recv", "decode", "batch", *ENGINE, "encode", "total"]
    total = timing.pop("total")
    assert round(sum(timing.values()) + stall, 3) == total
    assert timing["prefill"] > 0
    assert timing["prefill"] + timing["generate"] > total / 2


QUEUED_SECS = 0.5
"""A wait in the engine that takes longer than the answer of two tokens."""


def test_an_account_names_the_limit_of_the_engine_and_counts_its_requests(server: Serving) -> None:
    body = {"id": "queued", "text_input": "Once", "max_tokens": 2, "timing": True}
    with Connection(server.ports["http"]) as connection:
        with crowd(server, streamed("Once upon", **ENDLESS), MAX_RUNNING):
            connection.ask("/v2/models/llama/generate", body)
            server.wait_metric(IN_FLIGHT, "llama", MAX_RUNNING + 1)
            time.sleep(QUEUED_SECS)
        assert connection.answer().status == 200
    found = httpx.get(f"{server.http}/admin/why/queued").json()
    assert found["why"][0].endswith(
        f" in the queue of the engine: the limit is max_num_seqs ({MAX_RUNNING})."
    )
    assert found["why"][1] == (
        f"When it began, its instance executed {MAX_RUNNING} further requests, 0 of them of other "
        "tenants."
    )
    assert found["batch"]["requests"] == MAX_RUNNING + 1
