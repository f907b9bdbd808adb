"""The guardrail `golden`: a candidate that fails golden requests twice in a row is taken back."""

import asyncio
from typing import Any, NoReturn

import pytest

from tests.builders import settle
from tests.gateway.models.golden.files import write_golden
from tests.gateway.rollouts.servers import BROKEN, TURNS, NumberedBackend, RolloutServer

STEPS = [{"weight": 100, "for": "1h", "min_requests": 0}]
EVERY_SECOND = {"golden": {"every": "1s"}}


def expecting(answer: str) -> dict[str, Any]:
    return {"request": {"text": "hello"}, "expect": {"text": {"equals": answer}}, "versions": [2]}


async def until_place(server: RolloutServer, state: str) -> None:
    """Wait until the rollout is in that state, which takes two rounds."""
    for _ in range(TURNS):
        if server.place[0] == state:
            return
        server.tick()
        await asyncio.sleep(0.002)
    raise AssertionError(f"found {server.place}, expected {state}")


async def test_a_candidate_that_fails_twice_is_rolled_back_with_the_reason(
    server: RolloutServer,
) -> None:
    await server.publish(2, steps=STEPS, guardrails=EVERY_SECOND)
    write_golden(server.folder / "m", "other", expecting("2"))
    write_golden(server.folder / "m", "answer", expecting("other"))
    candidate = server.model("2")
    await until_place(server, "rolled_back")
    last = server.rollouts.history("m")[-1]
    assert (last.by, last.reason) == (
        "guardrail:golden",
        "golden request 'answer': text is not 'other': '2'",
    )
    assert candidate.statistics.success.count == 0
    assert candidate.statistics.execution_count == 0
    await server.until_versions("1")


async def test_a_candidate_that_passes_or_refuses_goes_its_way(
    server: RolloutServer, backend: NumberedBackend
) -> None:
    await server.publish(2, steps=STEPS, guardrails=EVERY_SECOND)
    write_golden(server.folder / "m", "answer", expecting("2"))
    for _ in range(2):
        server.tick()
        await settle()
        await asyncio.sleep(0.6)
    assert server.place == ("baking", 100)
    backend.errors["2"] = BROKEN
    await until_place(server, "rolled_back")
    assert "golden request 'answer': failed" in server.rollouts.history("m")[-1].reason


async def test_a_round_with_a_fault_is_logged_and_the_next_one_counts(
    server: RolloutServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def faulty(*_: object) -> NoReturn:
        raise ValueError("a fault")

    await server.publish(2, steps=STEPS, guardrails=EVERY_SECOND)
    similar = {"similar": {"to": "x", "model": "embed"}}
    golden = {**expecting(""), "expect": {"text": {**similar, "equals": "2"}}}
    write_golden(server.folder / "m", "answer", golden)
    with monkeypatch.context() as patched:
        patched.setattr("gateway.rollouts.golden_watch.cosine", faulty)
        await until_logged(server, caplog, "golden requests not sent")
    assert server.place == ("baking", 100)
    write_golden(server.folder / "m", "answer", expecting("other"))
    await until_place(server, "rolled_back")


async def until_logged(server: RolloutServer, caplog: pytest.LogCaptureFixture, text: str) -> None:
    for _ in range(TURNS):
        if text in caplog.messages:
            return
        server.tick()
        await asyncio.sleep(0.002)
    raise AssertionError(f"found {caplog.messages}, expected {text!r}")
