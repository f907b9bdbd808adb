"""Figures of the model on the metrics page, and their growth."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.serving import Serving, wait_until

WASTED = "gateway_wasted_tokens_total"
OF_ENGINE = ("vllm:", "gateway_vllm_", WASTED)
"""Metrics of engines, which are those of a router's replicas."""
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
IN_FLIGHT = "gateway_requests_in_flight"
PENDING = "nv_inference_pending_request_count"
GENERATED = "vllm:generation_tokens_total"
CANCELED = "CANCELED"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
"""The tokens of prompts that the engine has read to their end."""
A_FEW_TOKENS = 32
"""The tokens that the engine may make for a client before it notices the disconnect."""
STEPS = "vllm:iteration_tokens_total_count"
"""The steps that the engine has made."""
DROPPED_SECS = 1.0
LEAST_STEPS = 2
"""The step in progress when a client disconnects, and the step that notices it."""
LONGEST_SECS = 10.0
NEXT_SECS = 0.2
"""Between two looks at a growing number, whose page would take the engine's processor otherwise."""


def figures(server: Serving) -> defaultdict[str, float]:
    """Every metric of the model, summed over its other labels; failures also by their reason."""
    found: defaultdict[str, float] = defaultdict(float)
    for sample, value in _samples(server):
        name, _, labels = sample.partition("{")
        if 'model="llama"' in labels:
            found[name] += value
            if 'reason="' in labels and name == "nv_inference_request_failure":
                found[labels.partition('reason="')[2].partition('"')[0]] += value
    return found


def _samples(server: Serving) -> Iterator[tuple[str, float]]:
    for sample, value in server.metrics().items():
        if not (server.hosts and sample.startswith(OF_ENGINE)):
            yield sample, value
    for host in server.hosts:
        for sample, value in host.metrics().items():
            if sample.startswith(OF_ENGINE):
                yield sample, value


def diverted(server: Serving) -> float:
    """The outputs of ended requests that were diverted."""
    hosts = server.hosts or (server,)
    return sum(each.metric("gateway_vllm_outputs_total", "llama", way="diverted") for each in hosts)


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


def wait_at_rest(server: Serving) -> None:
    """Wait until no request is in flight, as `wait_in_engine`."""
    try:
        wait_in_engine(server, lambda: not under_way(server), "nothing is under way")
    except AssertionError as error:
        error.add_note(f"at the end: {under_way(server)}")
        raise


def wait_in_engine(server: Serving, condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds; AssertionError says what did not come true in time.

    The time is over after DROPPED_SECS, and on a busy machine not before LEAST_STEPS steps of the
    engine, but after LONGEST_SECS in any case.
    """
    began, steps, is_so = time.monotonic(), figures(server)[STEPS], False

    def is_over() -> bool:
        nonlocal is_so
        is_so = condition()
        secs = time.monotonic() - began
        made = figures(server)[STEPS] - steps
        return is_so or secs >= LONGEST_SECS or (secs >= DROPPED_SECS and made >= LEAST_STEPS)

    wait_until(is_over, what)
    assert is_so, f"not within {DROPPED_SECS:g} s and {LEAST_STEPS} steps: {what}"


def wait_generated(server: Serving, tokens: float) -> None:
    """Wait until the engine has generated more tokens; the time for each further one is limited."""
    found = figures(server)[GENERATED]
    while found <= tokens:
        time.sleep(NEXT_SECS)
        last = found
        wait_until(lambda last=last: figures(server)[GENERATED] > last, f"{last:g} tokens grow")
        found = figures(server)[GENERATED]
