"""Contents of a receipt: parts of the time without waits for the client, and the batch."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from itertools import islice
from typing import Final, NamedTuple

from gateway.messages import InferRequest, Phases
from gateway.observability.request_record import Record
from gateway.policy.caller import tenant_of

Part = tuple[str, int]
"""The name and the duration of a part, in nanoseconds."""
NO_STALLS: Final = (0, 0)
"""The waits of a request that never waited: during its execution, and after it."""

SHOWN_TENANTS = 8
"""Other tenants of a batch that are named."""
MS = 1000
US = 1000
SHORT_US = 4096
SHORT = tuple([str(us / MS) for us in range(SHORT_US)])
"""The texts of short times, in milliseconds, by their microseconds."""

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


def short_header(begun_ns: int, whole_ns: int, record: Record, phases: Phases) -> str:
    """The header of a request with tensors that has just ended; "" for others.

    Most receipts are read in this form alone: without lists of parts it costs a fifth. The times
    are those of `_rounded`, since `begun_ns` is half a microsecond early.
    """
    started_ns, ended_ns = record.started_ns - begun_ns, record.ended_ns - begun_ns
    whole = (whole_ns - begun_ns) // US
    decoded = (record.submitted_ns - begun_ns) // US
    started, ended = started_ns // US, ended_ns // US
    gathered = (started_ns + phases.input_ns) // US
    inferred = (ended_ns - phases.output_ns) // US
    total = (time.perf_counter_ns() - begun_ns) // US
    is_ordered = 0 <= whole <= decoded <= started <= gathered <= inferred <= ended <= total
    if not is_ordered or total >= SHORT_US or record.engine or record.completion_tokens:
        return ""
    batch = f"batch;dur={SHORT[started - decoded]}"
    if record.released_ns:
        released = (record.released_ns - begun_ns) // US
        if not decoded <= released <= started:
            return ""
        batch = f"queue;dur={SHORT[released - decoded]}, batch;dur={SHORT[started - released]}"
    return (
        f"recv;dur={SHORT[whole]}, decode;dur={SHORT[decoded - whole]}, {batch}, "
        f"input;dur={SHORT[gathered - started]}, infer;dur={SHORT[inferred - gathered]}, "
        f"output;dur={SHORT[ended - inferred]}, encode;dur={SHORT[total - ended]}, "
        f"total;dur={SHORT[total]}"
    )


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
    shared: Mapping[str, int] | None = None,
) -> None:
    """Note in the receipts of requests that they execute together.

    `shared` counts all requests that the instance executes by tenant, if it takes every one.
    """
    receipts = [each.receipt for each in requests if each.receipt is not None]
    if not receipts:
        return
    own = tenant_of(requests[0].caller)
    if shared is not None:
        tenants = {own: shared[own], **dict(islice(shared.items(), SHOWN_TENANTS + 1))}
        batch = Batch(rows, tenants, hold, sum(shared.values()))
    elif len(requests) > 1:
        batch = Batch(rows, Counter([tenant_of(each.caller) for each in requests]), hold)
    else:
        batch = Batch(rows, {own: 1}, hold)  # a Counter takes longer
    for receipt in receipts:
        receipt.executes(batch)
