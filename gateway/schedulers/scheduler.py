"""What decides which requests execute together, and when."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from gateway.backend import Instance
from gateway.errors import InferenceError
from gateway.messages import InferRequest
from gateway.schedulers.execution import Entry, Execution
from gateway.schedulers.rate_limiter import Registration
from gateway.stream import ResponseStream


class Scheduler(ABC):
    """Hands entries to instances. One task runs it; everything else is plain."""

    def admit(self, request: InferRequest) -> None:  # noqa: B027 - most queues have no bound
        """Raise InferenceError if the queue cannot take this request; asked before `submit`."""

    @abstractmethod
    def submit(self, entry: Entry) -> None:
        """Take an entry; the order of calls is the order of the queue."""

    def answered(self, stream: ResponseStream) -> None:  # noqa: B027 - most keep no order
        """Take note of a request that is not submitted, because its answer is there (a cache's)."""

    def continues(self, request: InferRequest) -> bool:
        """Whether it goes on with a sequence that has begun here, and not ended."""
        return False

    async def sequences_ended(self) -> None:
        """Wait until no sequence takes any more requests; most schedulers have none."""
        return

    async def prepare(self, instance: Instance) -> None:  # noqa: B027 - most need to know nothing
        """Learn from an idle instance what scheduling needs; comes before `add`."""

    @abstractmethod
    def add(self, instance: Instance, share: Registration | None = None) -> None:
        """Let an instance take executions; with a share, each when the rate limiter says so."""

    @abstractmethod
    def remove(self, instance: Instance, error: InferenceError) -> None:
        """Hand nothing more to an instance that has died; what it was executing gets the error."""

    @abstractmethod
    async def withdraw(self, instance: Instance) -> None:
        """Hand nothing more to a living instance; returns once what it was executing has ended.

        It may die meanwhile: `remove` then ends what it was executing.
        """

    @property
    @abstractmethod
    def executions(self) -> Iterable[Execution]:
        """Those that have not ended."""

    @abstractmethod
    async def run(self) -> None:
        """Own the executions until cancelled."""
