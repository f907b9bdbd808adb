"""Contents of a receipt: parts of the time without waits for the client, and the batch."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from itertools import islice
from typing import Final, NamedTuple

from gateway.messages import InferRequest
from gateway.policy.caller import tenant_of

Part = tuple[str, int]
"""The name and the duration of a part, in nanoseconds."""
NO_STALLS: Final = (0, 0)
"""The waits of a request that never waited: during its execution, and after it."""

SHOWN_TENANTS = 8
"""Other tenants of a batch that are named."""
EXECUTION = ("generate", "engine", "infer", "detokenize", "output", "steps", "replay", "batch")
"""The parts in which an answer that is sent may wait for its client, the likeliest first."""


def less_stalls(parts: list[Part], during_ns: int, after_ns: int) -> list[Part]:
    """The parts without the waits for the client, which are a part of their own."""
    if not (during_ns or after_ns):
        return parts
    left = dict(parts)
    stall_ns = 0
    for wait_ns, names in ((during_ns, EXECUTION), (after_ns, ("encode",))):
        for name in names:
            taken_ns = min(wait_ns, left.get(name, 0))
            if taken_ns:
                left[name] -= taken_ns
                wait_ns -= taken_ns
                stall_ns += taken_ns
    return [*left.items(), ("stall", stall_ns)]


class Bound(Enum):
    """The limit that keeps a queued request from its execution."""

    INSTANCES = auto()
    DELAY = auto()
    TURN = auto()
    UNKNOWN = auto()


class Hold(NamedTuple):
    """A limit that binds since a time, although an instance is free.

    Times are of `time.perf_counter_ns`; until then no instance was free.
    """

    bound: Bound
    since_ns: int

    def also(self, bound: Bound) -> "Hold":
        """The limit of queued requests that wait for this, too, although an instance is free."""
        if self is NO_HOLD:
            return Hold(bound, time.perf_counter_ns())
        return self if self.bound is bound else Hold(Bound.UNKNOWN, self.since_ns)

    def over(self, queued_ns: int, started_ns: int) -> Bound:
        """The limit for the longer part of a wait."""
        held_ns = started_ns - max(self.since_ns, queued_ns)
        return self.bound if 2 * held_ns >= started_ns - queued_ns else Bound.INSTANCES


NO_HOLD: Final = Hold(Bound.INSTANCES, 0)
NOT_KNOWN: Final = Hold(Bound.UNKNOWN, 0)


class Batch(NamedTuple):
    """An execution: its rows, the number of its requests of each tenant, and what they waited for.

    If it is `shared`, as with engines, which batch in flight, that is the number of all requests
    that its instance executes as it begins, and only SHOWN_TENANTS other tenants are named.
    """

    rows: int
    tenants: Mapping[str, int]
    hold: Hold = NOT_KNOWN
    shared: int = 0

    @property
    def requests(self) -> int:
        """The number of its requests."""
        return self.shared or sum(self.tenants.values())


def note_batch(
    requests: Sequence[InferRequest],
    rows: int,
    hold: Hold = NOT_KNOWN,
    shared: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Note in the receipts of requests that they execute together.

    `shared` gives the tenants of all requests that the instance executes, if it takes every one.
    """
    own = tenant_of(requests[0].caller)
    if shared is not None:
        found = shared()
        counts = Counter(found)
        tenants = {own: counts[own], **dict(islice(counts.items(), SHOWN_TENANTS + 1))}
        batch = Batch(rows, tenants, hold, len(found))
    elif len(requests) > 1:
        batch = Batch(rows, Counter([tenant_of(each.caller) for each in requests]), hold)
    else:
        batch = Batch(rows, {own: 1}, hold)  # a Counter takes longer
    for request in requests:
        if request.receipt is not None:
            request.receipt.executes(batch)
