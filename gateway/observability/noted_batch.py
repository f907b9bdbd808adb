"""The batch of an execution, as the receipts of its requests have it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.messages import InferRequest
from gateway.policy.caller import tenant_of


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
