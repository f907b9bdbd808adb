"""Requests of a simulation: sessions, or a trace of Mooncake or Azure."""

import csv
import math
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


class Blocks:
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
    blocks = Blocks()
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


def _session(
    at: float,
    system: tuple[int, Sequence[bytes]],
    turn_tokens: float,
    blocks: Blocks,
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
    blocks = Blocks()
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
