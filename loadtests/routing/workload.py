"""Requests of a simulation: conversations, sessions, or a trace of Mooncake or Azure."""

import csv
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count, islice, pairwise
from pathlib import Path
from random import Random

import orjson

from gateway.fleet.keys import KEY_BYTES
from loadtests.support.servers import LoadTestFailed

BLOCK_TOKENS = 512
TURNS_AFTER_FIRST = 3.0
THINK_SECS = 30.0
LEAD_SECS = 300.0
"""Sessions begin this long before the first request, so that all turns are as frequent then."""
SYSTEM_PROMPTS, ZIPF = 50, 1.2
REQUEST_TOKENS, SYSTEM_TOKENS, ANSWER_TOKENS = 12_800.0, 2000.0, 347.0
"""Means; those of requests and answers are of Mooncake's conversation trace."""
SYSTEM_SIGMA, TURN_SIGMA, ANSWER_SIGMA = 0.5, 1.0, 0.8
MOST_TOKENS = 120_000

TRACE_RATE = 3.34
"""Requests a second of Mooncake's conversation trace."""
PLACES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
"""The places of the quantiles below, in order of size, of 265 requests of the trace."""
FIRST_QUANTILES = (
    *(890, 930, 1190, 1960, 4280, 5090, 7110, 9220, 13_900, 23_000, 37_000, 67_000, 124_000),
)
"""Tokens of the first prompt of a conversation."""
GROWTH_QUANTILES = (
    *(100, 300, 512, 780, 1000, 1000, 1100, 1500, 3600, 7200, 11_800, 17_400, 73_700),
)
"""Tokens of a later prompt that the one before it does not have."""
ANSWER_QUANTILES = (1, 20, 52, 155, 255, 356, 412, 478, 529, 665, 788, 958, 2000)
PAUSE_SECS, PAUSE_SIGMA = 162.0, 1.07
"""The median of the time between two prompts of a conversation, and the sigma of its logarithm."""
FURTHER, LONG, FURTHER_OF_LONG = 0.37, 0.01, 0.9
"""The chance of a further prompt, the share of long conversations, and their chance of one."""
CONVERSATION_LEAD_SECS = 3600.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: its arrival, its tokens, those of its answer, and the keys of its full blocks."""

    at: float
    tokens: int
    answer: int
    keys: tuple[bytes, ...]

    @property
    def blocks(self) -> int:
        """The blocks of the prompt with its answer."""
        return math.ceil((self.tokens + self.answer) / BLOCK_TOKENS)


class _Blocks:
    """Keys that no other block has."""

    def __init__(self) -> None:
        self._numbers = count()

    def new(self, number: int) -> list[bytes]:
        """Keys of blocks that occur for the first time."""
        return [key_of(each) for each in islice(self._numbers, max(0, number))]


def key_of(number: int) -> bytes:
    """The key of a numbered block."""
    return number.to_bytes(KEY_BYTES, "little")


def synthetic(
    rate: float, requests: int, random: Random, system_tokens: float = SYSTEM_TOKENS
) -> Sequence[Prompt]:
    """Sessions of 1 + Poisson(3) turns, thinking times, and system prompts by Zipf's law.

    The longer the system prompts are, the shorter are those of the turns: a request of an average
    turn has `REQUEST_TOKENS`.
    """
    earlier = TURNS_AFTER_FIRST / 2 + TURNS_AFTER_FIRST / (2 + 2 * TURNS_AFTER_FIRST)
    turn_tokens = (REQUEST_TOKENS - system_tokens - earlier * ANSWER_TOKENS) / (1 + earlier)
    blocks = _Blocks()
    sizes = [_log_normal(random, system_tokens, SYSTEM_SIGMA) for _ in range(SYSTEM_PROMPTS)]
    systems = [(size, blocks.new(size // BLOCK_TOKENS)) for size in sizes]
    weights = [1 / place**ZIPF for place in range(1, SYSTEM_PROMPTS + 1)]
    found: list[Prompt] = []
    at, end = -LEAD_SECS, requests / rate * 1.2 + THINK_SECS
    while at < end:
        at += random.expovariate(rate / (1 + TURNS_AFTER_FIRST))
        system = random.choices(systems, weights)[0]
        found += _session(at, system, turn_tokens, blocks, random)
    found.sort(key=lambda each: each.at)
    return [each for each in found if each.at >= 0][:requests]


def conversations(rate: float, requests: int, random: Random) -> Sequence[Prompt]:
    """Conversations that are like those of Mooncake's trace, at another rate.

    Their times are those of the trace with its rate, scaled, as those of a file are. All of them
    begin with the same block.
    """
    blocks = _Blocks()
    system = tuple(blocks.new(1))
    turns = (1 - LONG) / (1 - FURTHER) + LONG / (1 - FURTHER_OF_LONG)
    found: list[Prompt] = []
    at, end = -CONVERSATION_LEAD_SECS, requests / TRACE_RATE * 1.2 + PAUSE_SECS
    while at < end:
        at += random.expovariate(TRACE_RATE / turns)
        found += _conversation(at, system, blocks, random)
    found.sort(key=lambda each: each.at)
    scale = TRACE_RATE / rate
    return [replace(each, at=each.at * scale) for each in found if each.at >= 0][:requests]


def _conversation(
    at: float, keys: tuple[bytes, ...], blocks: _Blocks, random: Random
) -> Iterator[Prompt]:
    further = FURTHER_OF_LONG if random.random() < LONG else FURTHER
    tokens = _by_quantiles(random, FIRST_QUANTILES)
    while tokens <= FIRST_QUANTILES[-1]:
        keys = (*keys, *blocks.new(tokens // BLOCK_TOKENS - len(keys)))
        yield Prompt(at, tokens, _by_quantiles(random, ANSWER_QUANTILES), keys)
        if random.random() >= further:
            return
        tokens += _by_quantiles(random, GROWTH_QUANTILES)
        at += random.lognormvariate(math.log(PAUSE_SECS), PAUSE_SIGMA)


def _by_quantiles(random: Random, quantiles: Sequence[float]) -> int:
    """A value between two of the quantiles, by their logarithms."""
    place = random.random()
    after = bisect_right(PLACES, place)
    before, width = PLACES[after - 1], PLACES[after] - PLACES[after - 1]
    low, high = quantiles[after - 1 : after + 1]
    return round(low * (high / low) ** ((place - before) / width))


def _session(
    at: float,
    system: tuple[int, Sequence[bytes]],
    turn_tokens: float,
    blocks: _Blocks,
    random: Random,
) -> Iterator[Prompt]:
    """The requests of a session, which begin with its system prompt."""
    tokens, keys = system
    for _ in range(1 + _poisson(random, TURNS_AFTER_FIRST)):
        tokens += _log_normal(random, turn_tokens, TURN_SIGMA)
        if tokens > MOST_TOKENS:
            return
        keys = (*keys, *blocks.new(tokens // BLOCK_TOKENS - len(keys)))
        answer = _log_normal(random, ANSWER_TOKENS, ANSWER_SIGMA)
        yield Prompt(at, tokens, answer, keys)
        tokens += answer
        at += random.expovariate(1 / THINK_SECS)


def _log_normal(random: Random, mean: float, sigma: float) -> int:
    return max(1, round(random.lognormvariate(math.log(max(1.0, mean)) - sigma**2 / 2, sigma)))


def _poisson(random: Random, mean: float) -> int:
    found, product = 0, random.random()
    while product > math.exp(-mean):
        found, product = found + 1, product * random.random()
    return found


def read_trace(path: Path, rate: float, requests: int) -> Sequence[Prompt]:
    """The first requests of a trace at another rate: Mooncake's JSONL, or Azure's CSV."""
    read = _azure if path.suffix == ".csv" else _mooncake
    try:
        found = list(islice(read(path), requests))
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise LoadTestFailed(f"trace '{path.name}' cannot be read: {error!r:.200}") from None
    if len(found) < 2:
        raise LoadTestFailed(f"trace '{path.name}' has {len(found)} requests, expected 2 or more")
    spread = _spread([each.at for each in found])
    scale = len(found) / rate / (spread[-1] - spread[0] or 1.0)
    times = [(at - spread[0]) * scale for at in spread]
    return [replace(each, at=at) for each, at in zip(found, times, strict=True)]


def _mooncake(path: Path) -> Iterator[Prompt]:
    with path.open("rb") as lines:
        for line in lines:
            found = orjson.loads(line)
            tokens = found["input_length"]
            keys = tuple(map(key_of, found["hash_ids"][: tokens // BLOCK_TOKENS]))
            yield Prompt(found["timestamp"] / 1000, tokens, max(1, found["output_length"]), keys)


def _azure(path: Path) -> Iterator[Prompt]:
    blocks = _Blocks()
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            tokens, answer = int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"]))
            yield Prompt(at, tokens, answer, tuple(blocks.new(tokens // BLOCK_TOKENS)))


def _spread(times: Sequence[float]) -> Sequence[float]:
    """Distribute requests of one time up to the next time: Mooncake's times step by 3 seconds."""
    totals = Counter(times)
    distinct = sorted(totals)
    width = (distinct[-1] - distinct[0]) / max(1, len(distinct) - 1)
    ends = {**dict(pairwise(distinct)), distinct[-1]: distinct[-1] + width}
    places: Counter[float] = Counter()
    found = []
    for at in times:
        found.append(at + (ends[at] - at) * places[at] / totals[at])
        places[at] += 1
    return found
