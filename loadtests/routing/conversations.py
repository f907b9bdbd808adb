"""Conversations that are like those of Mooncake's conversation trace.

The figures are of 965 requests in five places of its first half hour; those of turns, lengths and
pauses are of the 839 requests after 15 minutes. The page has them with those of the result.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from random import Random

from loadtests.routing.workload import BLOCK_TOKENS, Blocks, Prompt

TRACE_RATE = 3.0
"""Requests a second of the trace in its first half hour (3.4 in the whole hour)."""
PLACES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
"""The places of the quantiles below, in order of size."""
FIRST_QUANTILES = (
    *(892, 903, 1112, 1753, 3949, 6098, 8287, 12_394, 18_020, 28_196, 45_403, 72_275, 122_766),
)
"""Tokens of the first prompt of a conversation."""
ADDED_QUANTILES = (*(1, 273, 463, 639, 726, 882, 1107, 2669, 5859, 10_498, 15_558, 20_960, 94_968),)
"""Tokens of a later prompt behind the blocks that it has in common with an earlier one."""
ANSWER_QUANTILES = (1, 18, 89, 215, 297, 355, 400, 451, 520, 618, 730, 924, 2000)
MOST_TOKENS = 125_000
PAUSE_SECS, PAUSE_SIGMA = 152.0, 0.98
"""The median of the time between two prompts of a conversation, and the sigma of its logarithm."""
LARGE_TOKENS = 10_000
FURTHER_OF_SMALL, FURTHER_OF_LARGE, FURTHER = 0.5, 0.3, 0.43
"""The chance of a second prompt, by the tokens of the first one, and of each further prompt."""
LONG, FURTHER_OF_LONG = 0.01, 0.9
"""The share of long conversations, and their chance of a further prompt."""
LEAD_SECS = 3600.0
"""Conversations begin this long before the first request."""


class Turn(StrEnum):
    """A prompt of a conversation, by what it adds.

    MATERIAL, such as results of a search, is not in the next prompt that brings new material.
    """

    FIRST = "FIRST"
    PLAIN = "PLAIN"
    MATERIAL = "MATERIAL"


MATERIAL_AFTER = {Turn.FIRST: 1 / 3, Turn.PLAIN: 0.07, Turn.MATERIAL: 0.7}
"""The chance that a further prompt brings material, by the prompt before it."""
MATERIAL_PLACE = 0.7
"""The place of the least material in `ADDED_QUANTILES`, 2,669 tokens."""
FIRST_IS_MATERIAL = 0.38
"""The share of first prompts that a prompt with material keeps the beginning of only."""
MOST_KEPT_BLOCKS = 3
"""Of a prompt with material the next material leaves one to three blocks behind the earlier ones:
the question, and its answer."""


def conversations(rate: float, requests: int, random: Random) -> Sequence[Prompt]:
    """Conversations as in the trace, at another rate.

    Their times are those of the trace with its rate, scaled, as those of a file are. All of them
    begin with the same block.
    """
    blocks = Blocks()
    system = tuple(blocks.new(1))
    turns = (1 - LONG) / (1 - FURTHER) + LONG / (1 - FURTHER_OF_LONG)
    found: list[Prompt] = []
    at, end = -LEAD_SECS, requests / TRACE_RATE * 1.2 + PAUSE_SECS
    while at < end:
        at += random.expovariate(TRACE_RATE / turns)
        found += _conversation(at, system, blocks, random)
    found.sort(key=lambda each: each.at)
    scale = TRACE_RATE / rate
    return [replace(each, at=each.at * scale) for each in found if each.at >= 0][:requests]


def _conversation(
    at: float, keys: tuple[bytes, ...], blocks: Blocks, random: Random
) -> Iterator[Prompt]:
    is_long = random.random() < LONG
    turn, before = Turn.FIRST, len(keys)
    tokens = _by_quantiles(random.random(), FIRST_QUANTILES)
    while tokens <= MOST_TOKENS:
        keys = (*keys, *blocks.new(tokens // BLOCK_TOKENS - len(keys)))
        answer = _by_quantiles(random.random(), ANSWER_QUANTILES)
        yield Prompt(at, tokens, answer, keys)
        if random.random() >= (FURTHER_OF_LONG if is_long else _further(turn, tokens)):
            return
        if random.random() < MATERIAL_AFTER[turn]:
            if turn is Turn.MATERIAL or (
                turn is Turn.FIRST and random.random() < FIRST_IS_MATERIAL
            ):
                keys = keys[: before + random.randint(1, MOST_KEPT_BLOCKS)]
            turn, before, place = Turn.MATERIAL, len(keys), random.uniform(MATERIAL_PLACE, 1)
        else:
            turn, place = Turn.PLAIN, random.uniform(0, MATERIAL_PLACE)
        added = _by_quantiles(place, ADDED_QUANTILES)
        tokens = max(FIRST_QUANTILES[0], len(keys) * BLOCK_TOKENS + added)
        at += random.lognormvariate(math.log(PAUSE_SECS), PAUSE_SIGMA)


def _further(turn: Turn, tokens: int) -> float:
    if turn is not Turn.FIRST:
        return FURTHER
    return FURTHER_OF_SMALL if tokens < LARGE_TOKENS else FURTHER_OF_LARGE


def _by_quantiles(place: float, quantiles: Sequence[float]) -> int:
    """The value at a place, between two of the quantiles by their logarithms."""
    after = min(bisect_right(PLACES, place), len(PLACES) - 1)
    before, width = PLACES[after - 1], PLACES[after] - PLACES[after - 1]
    low, high = quantiles[after - 1 : after + 1]
    return round(low * (high / low) ** ((place - before) / width))
