"""What may stand between the acceptance of a request and its scheduler?"""

from typing import Protocol

from gateway.observability.request_record import Record
from gateway.schedulers.execution import Entry
from gateway.schedulers.scheduler import Scheduler
from gateway.stream import StreamRecorder


class Gate(Protocol):
    """Decides when a request that its model has accepted goes to the scheduler."""

    def recorder(self, record: Record) -> StreamRecorder:
        """What is to account for the request's stream; it tells the record all that it hears."""

    def submit(self, entry: Entry, scheduler: Scheduler) -> None:
        """Take the request: submit it now or later, or end its stream. Must not raise."""
