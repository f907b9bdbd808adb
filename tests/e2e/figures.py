"""Figures of the model on the metrics page, and their growth."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from tests.serving import Serving, wait_until

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
IN_FLIGHT = "gateway_requests_in_flight"
PENDING = "nv_inference_pending_request_count"
WASTED = "gateway_wasted_tokens_total"
CANCELED = "CANCELED"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
"""The tokens of prompts that the engine has read to their end."""
A_FEW_TOKENS = 32
"""The tokens that the engine may make for a client before it notices the disconnect."""
STEPS_SECS = 10.0
"""Enough for the engine's steps in progress on a busy machine; an endless answer takes minutes."""


def figures(server: Serving) -> defaultdict[str, float]:
    """Every metric of the model, summed over its other labels; failures also by their reason."""
    found: defaultdict[str, float] = defaultdict(float)
    for sample, value in server.metrics().items():
        name, _, labels = sample.partition("{")
        if 'model="llama"' in labels:
            found[name] += value
            if 'reason="' in labels and name == "nv_inference_request_failure":
                found[labels.partition('reason="')[2].partition('"')[0]] += value
    return found


@contextmanager
def changes(server: Serving) -> Iterator[dict[str, float]]:
    """By how much each metric has grown in the block; to be read after it."""
    change: dict[str, float] = {}
    before = figures(server)
    yield change
    change |= {name: value - before[name] for name, value in figures(server).items()}


def under_way(server: Serving) -> dict[str, float]:
    """The requests that the gateway or the engine has, by what they are counted as; none is left.

    The engine's numbers are those of its last step.
    """
    found = figures(server)
    return {name: found[name] for name in (RUNNING, WAITING, IN_FLIGHT, PENDING) if found[name]}


def wait_at_rest(server: Serving, within: float = STEPS_SECS) -> None:
    """Wait until no request is in flight."""
    try:
        wait_until(lambda: not under_way(server), "nothing is under way", within)
    except AssertionError as error:
        error.add_note(f"after {within:g} s: {under_way(server)}")
        raise
