"""The use of loaded versions: their requests and sequences, and those of ensembles."""

from gateway.observability.request_record import RequestsInFlight
from gateway.schedulers.scheduler import Scheduler


class VersionUsage:
    """The use of a loaded version; `by` are those of the ensembles that call it.

    Implements `InUse`.
    """

    def __init__(self, requests: RequestsInFlight, scheduler: Scheduler) -> None:
        self.by: list[VersionUsage] = []
        self._requests = requests
        self._scheduler = scheduler

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def present(self) -> bool:
        """Whether it has requests or open sequences, or an ensemble that calls it has."""
        sequences = self._scheduler.sequences
        if self._requests or (sequences is not None and sequences.are_open):
            return True
        return any(each.present for each in self.by)
