"""The schedulers with the same cases."""

from dataclasses import replace

from gateway.config.scheduling import QueuePolicy
from gateway.errors import Code, InferenceError
from tests.builders import (
    TEXT,
)
from tests.gateway.schedulers.queues import TOKENS, dynamic
from tests.gateway.sequences.parts import direct, oldest

SLOW = QueuePolicy(default_timeout_microseconds=60_000_000, max_queue_size=100)


BROKEN = InferenceError(Code.INTERNAL, "broken")


SCHEDULERS = {
    "direct": TEXT,
    "dynamic": dynamic(1),
    "dynamic, with timeouts": dynamic(1, default_queue_policy=SLOW),
    "dynamic, in order": dynamic(1, preserve_ordering=True),
    "dynamic, by length": replace(TOKENS, max_batch_size=1),
    "sequences, direct": direct(slots=1),
    "sequences, oldest": oldest(candidates=1, max_batch_size=1),
    "sequences, oldest, in order": oldest(2, max_batch_size=1, preserve_ordering=True),
}
"""Requests for sequences are sequences of one request each."""
WITHOUT_TASK = {f"{scheduler}, without tasks": scheduler for scheduler in ("direct", "dynamic")}
"""Schedulers of instances that execute single requests without a task."""
