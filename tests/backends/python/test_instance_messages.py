"""Invalid messages of a worker end that worker only."""

import asyncio
from pathlib import Path

import pytest

from backends.python import instance as workers
from gateway.errors import InferenceError
from tests.backends.python.loading import Load, answers, request, soon
from tests.builders import death_of

WRITES = """
    def execute(self, requests):
        from sluice_worker.work import worker
        from sluice_worker.protocol import frame
        worker().connection._work.sendall(GARBAGE)
        return [response(x(each)) for each in requests]
"""


@pytest.mark.parametrize(
    "garbage",
    [
        "bytes(range(256)) * 10",
        "frame(b'')",
        "frame(b'not json')",
        "frame(b'5')",
        "frame(b'{}')",
        "frame(b'[]')",
        "frame(b'[null]')",
        "frame(b'[99, 1]')",
        "frame(b'[4]')",
        'frame(b\'[4, 1, [[["y", "FP32", [2], 8, 0]], null, null], true]\')',
        'frame(b\'[4, 1, [[["y", "FP32", [2], 8, 77]], null, null], true]\')',
        "frame(b'[4, 1, [[[\"y\", \"XYZ\", [2], 8, 0]], null, null], true]', [b'12345678'])",
        "frame(b'[4, 1, 5, true]')",
        "frame(b'[5, 77, null, [], 1]')",
        "frame(b'[5, 1, null, [[1]], 1]')",
        "frame(b'[10, 1, [0], false, []]')",
        "frame(b'[20, 5, 5]')",
    ],
)
async def test_an_invalid_message_ends_the_worker(
    load: Load, garbage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LAST_WORDS_SECS", 0.05)
    instance = await load(WRITES.replace("GARBAGE", garbage))
    found = await answers(instance, request(1))
    reason = await soon(death_of(instance))
    assert reason.endswith("Stub process 'm_0_0' is not healthy.")
    assert "it sent what cannot be understood" in reason
    for _, answer in found:
        if isinstance(answer, InferenceError):
            assert str(tmp_path) not in answer.message


@pytest.mark.parametrize(
    "garbage",
    [
        "frame(b'[4, 1000, [[], null, null], true]')",
        "frame(b'[11, 1000, true]')",
        "frame(b'[7, [1000], [1000]]')",
    ],
)
async def test_messages_about_closed_requests_and_calls_are_ignored(
    load: Load, garbage: str
) -> None:
    instance = await load(WRITES.replace("GARBAGE", garbage))
    died = asyncio.ensure_future(death_of(instance))
    for _ in range(3):
        assert not isinstance((await answers(instance, request(1)))[0][1], InferenceError)
    assert not died.done()
    died.cancel()
