"""The simulated conversations have the figures of Mooncake's conversation trace."""

import statistics
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from random import Random
from typing import NamedTuple

import pytest

from loadtests.routing.conversations import TRACE_RATE, conversations
from loadtests.routing.fleet import quantile
from loadtests.routing.workload import Prompt

RATE = 14.4
WINDOW_SECS = 3.0
SETTLED_SECS = 900.0
"""From this time of the trace on the figures are those of its conversations, not of its start."""
REQUESTS_OF_TRACE = 12_031


class Seen(NamedTuple):
    """A request, its blocks that were known, and the seconds since the latest of them was new."""

    prompt: Prompt
    known: int
    pause_secs: float
    kept: float
    """The known part of the request in which that block was new; 0 for a first prompt."""

    @property
    def added(self) -> int:
        """Tokens behind the known blocks."""
        return self.prompt.tokens - self.known * 512


def seen(prompts: Sequence[Prompt]) -> Sequence[Seen]:
    first: dict[bytes, Prompt] = {}
    found = []
    for prompt in prompts:
        known = len(list(takewhile(first.__contains__, prompt.keys)))
        earlier = first[prompt.keys[known - 1]] if known > 1 else prompt
        kept = known / len(earlier.keys) if known > 1 else 0.0
        found.append(Seen(prompt, known, prompt.at - earlier.at, kept))
        first.update(dict.fromkeys(prompt.keys[known:], prompt))
    return found


@cache
def settled() -> Sequence[Seen]:
    """Requests at the trace's own rate, of several seeds."""
    runs = [seen(conversations(TRACE_RATE, 5500, Random(seed))) for seed in range(1, 5)]
    return [each for run in runs for each in run if each.prompt.at > SETTLED_SECS]


def test_requests_are_as_long_as_those_of_the_trace() -> None:
    found = conversations(RATE, 6000, Random(1))
    assert [each.at for each in found] == sorted(each.at for each in found)
    assert found[-1].at == pytest.approx(6000 / RATE, rel=0.05)
    assert sum(each.tokens for each in found) / 6000 == pytest.approx(12_800, rel=0.05)
    assert sum(each.answer for each in found) / 6000 == pytest.approx(347, rel=0.05)
    assert quantile([each.tokens for each in found], 0.99) > 80_000
    assert len({each.keys[0] for each in found}) == 1


def test_as_many_blocks_are_repeated_as_in_the_trace() -> None:
    run = seen(conversations(TRACE_RATE, REQUESTS_OF_TRACE, Random(1)))
    blocks = sum(len(each.prompt.keys) for each in run)
    assert sum(each.known for each in run) / blocks == pytest.approx(0.37, abs=0.03)


def test_conversations_have_as_many_prompts_as_those_of_the_trace() -> None:
    later = [each for each in settled() if each.known > 1]
    assert len(later) / len(settled()) == pytest.approx(0.40, abs=0.02)
    pauses = [each.pause_secs for each in later]
    assert quantile(pauses, 0.5) == pytest.approx(156, rel=0.1)
    assert quantile(pauses, 0.9) == pytest.approx(595, rel=0.1)


def test_later_prompts_are_as_long_as_those_of_the_trace() -> None:
    later = [each for each in settled() if each.known > 1]
    assert statistics.mean(each.prompt.tokens for each in later) == pytest.approx(16_200, rel=0.1)
    assert statistics.mean(each.added for each in later) == pytest.approx(3770, rel=0.1)
    assert quantile([each.added for each in later], 0.5) == pytest.approx(882, rel=0.1)


def test_a_prompt_with_material_keeps_a_part_of_an_earlier_one_as_often_as_in_the_trace() -> None:
    material = [each for each in settled() if each.known > 1 and each.added > 2600]
    assert len(material) / sum(each.known > 1 for each in settled()) == pytest.approx(0.3, abs=0.04)
    parts = [each.kept for each in material if each.kept < 1]
    assert len(parts) / len(material) == pytest.approx(14 / 27, abs=0.15)
    assert statistics.mean(parts) == pytest.approx(0.31, abs=0.1)


def test_requests_arrive_as_evenly_as_in_the_trace() -> None:
    """There the variance of the requests in 3 s is 0.95 of their mean, with an error of 0.12."""
    run = conversations(TRACE_RATE, 6000, Random(1))
    windows = Counter(int(each.at // WINDOW_SECS) for each in run)
    counts = [windows[number] for number in range(int(run[-1].at // WINDOW_SECS))]
    dispersion = statistics.variance(counts) / statistics.mean(counts)
    assert dispersion == pytest.approx(0.95, abs=0.12)


def test_times_are_scaled_to_the_rate() -> None:
    slow, fast = (conversations(rate, 100, Random(1)) for rate in (TRACE_RATE, 10 * TRACE_RATE))
    assert [each.at / 10 for each in slow] == pytest.approx([each.at for each in fast])
    assert [each.keys for each in slow] == [each.keys for each in fast]
