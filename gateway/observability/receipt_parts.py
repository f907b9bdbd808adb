"""Contents of a receipt: parts of the time without waits for the client, and the batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gateway.messages import InferRequest
from gateway.policy.caller import tenant_of

Part = tuple[str, int]
"""The name and the duration of a part, in nanoseconds."""
NO_STALLS: Final = (0, 0)
"""The waits of a request that never waited: during its execution, and after it."""

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


class Batch(NamedTuple):
    """An execution: its rows, and the number of its requests of each tenant."""

    rows: int
    tenants: Mapping[str, int]


def note_batch(requests: Sequence[InferRequest], rows: int) -> None:
    """Note in the receipts of requests that they execute together."""
    tenants: Mapping[str, int] = {tenant_of(requests[0].caller): 1}  # a Counter takes longer
    if len(requests) > 1:
        tenants = Counter([tenant_of(each.caller) for each in requests])
    batch = Batch(rows, tenants)
    for request in requests:
        if request.receipt is not None:
            request.receipt.executes(batch)
