"""What streams of one LLM are measured by: tokens per second, first tokens, gaps between them."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain

from loadtests.doors import Door
from loadtests.generation_load import Load, Outcome, put
from loadtests.prompts import prompts
from loadtests.results import Better, Metric
from loadtests.rounds import LoadTestFailed
from loadtests.server import Server
from loadtests.sse import Address

PROMPT_WORDS = 32
WARM_UP_SEED = 0
PROMPT_TOKENS = "prompt tokens"


def warm_up(door: Door, load: Load, server: Server) -> Mapping[Metric, float]:
    """Put a load on a server that is not measured."""
    _put(door, load, WARM_UP_SEED, server)
    return {}


def measure(door: Door, load: Load, seed: int, server: Server) -> Mapping[Metric, float]:
    """Put a load on a server; what its client saw, if the server counted the same tokens."""
    counters = door.counters(server)
    before = counters.read()
    outcome = _put(door, load, seed, server)
    counted = counters.read_after(before, load.tokens)
    if counted.completion != load.tokens:
        raise LoadTestFailed(
            f"{server.name} counted {counted.completion} tokens, expected {load.tokens}"
        )
    return {**figures(outcome, load), Metric(PROMPT_TOKENS, load.streams, ""): counted.prompt}


def _put(door: Door, load: Load, seed: int, server: Server) -> Outcome:
    # Every load has prompts of its own, and both servers get the same.
    return put(load, Address(server.ports.http), door.encode, prompts(PROMPT_WORDS, seed))


def figures(outcome: Outcome, load: Load) -> Mapping[Metric, float]:
    """What was measured, from when the events came."""
    timings, streams = outcome.timings, load.streams
    gaps = list(chain.from_iterable(timing.gaps for timing in timings))
    firsts = [timing.first for timing in timings]
    events = sum(len(timing.arrivals) for timing in timings)
    return {
        Metric("tokens/s", streams, "", Better.HIGHER): load.tokens / outcome.secs,
        Metric("TTFT p50", streams, "ms", Better.LOWER): statistics.median(firsts) * 1e3,
        Metric("inter-token p99", streams, "ms", Better.LOWER): _p99(gaps) * 1e3,
        Metric("tokens per event", streams, ""): load.tokens / events,
        Metric("CPU of the client", streams, "cores"): outcome.client_cores,
    }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]
