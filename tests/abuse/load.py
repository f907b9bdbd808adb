"""Cases of load: large contents of a chat, and bursts beyond the capacity of a model."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.abuse.scene import Scene
from tests.raw import Answer

CHAT = "/v1/chat/completions"
MEBIBYTE = 1 << 20
MOST_RATIO = 6


def tool_output(scene: Scene) -> None:
    """A tool's output of 4 MiB takes less than six times the processor time of one of 1 MiB."""
    spent = {size: min(_spent(scene, size) for _ in range(3)) for size in (1, 4)}
    assert spent[4] <= MOST_RATIO * spent[1] + 2 / os.sysconf("SC_CLK_TCK"), spent


def _spent(scene: Scene, mebibytes: int) -> float:
    """The processor time that the server takes for a chat with that output (seconds)."""
    content = '<tool_call>{"a": "\\u00e4 \\\\ "}</tool_call>'
    output = content * (mebibytes * MEBIBYTE // len(content))
    messages = [
        {"role": "user", "content": "look"},
        {"role": "tool", "tool_call_id": "1", "content": output},
    ]
    before = _processor_secs(scene.server.process.pid)
    for _ in range(3):
        answer = scene.ask(CHAT, {"model": "openai", "messages": messages, "stream": True})
        assert b'"seen"' in answer.body, answer.body[:300]
    return _processor_secs(scene.server.process.pid) - before


def _processor_secs(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


CAPACITY = 2
BURST = 10 * CAPACITY
LASTING = {"text_input": "x", "n": 1, "delay_us": 500_000}


def bursts(scene: Scene) -> None:
    """Ten times the requests that a model accepts: it serves those, and all once they have ended.

    The others are refused with the reason.
    """
    ask = partial(scene.ask, "/v2/models/two_at_once/generate", LASTING)
    with ThreadPoolExecutor(BURST) as clients:
        for _ in range(2):
            answers = list(clients.map(lambda _: ask(), range(BURST)))
            served = [each for each in answers if each.status == 200]
            assert len(served) >= CAPACITY
            _refused(scene, [each for each in answers if each.status != 200])
    assert {ask().status for _ in range(2)} == {200}


def _refused(scene: Scene, answers: list[Answer]) -> None:
    assert answers
    for each in answers:
        scene.refused(each, (503,), "the most it accepts")
        assert each.headers["retry-after"] == "1"
