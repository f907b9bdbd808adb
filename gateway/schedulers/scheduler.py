"""The seam between a model and the scheduler of its requests."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from gateway.backend import Instance
from gateway.errors import InferenceError
from gateway.messages import InferRequest
from gateway.schedulers.execution import Entry, Execution
from gateway.schedulers.rate_limiter import Registration
from gateway.stream import ResponseStream


class Scheduler(ABC):
    """Executes entries on instances. One task owns `run`; synchronous methods never wait.

    Requests: `admit`, then `submit` or `answered`. Instances: `prepare`, `add`, then `remove` or
    `withdraw`. Sequences: `continues` and `sequences_ended`; other schedulers have none.
    """

    def admit(self, request: InferRequest) -> None:  # noqa: B027 - optional
        """Raise InferenceError if the queue cannot take this request; comes before `submit`."""

    @abstractmethod
    def submit(self, entry: Entry) -> None:
        """Queue an entry; the order of calls is the order of the queue."""

    def answered(self, stream: ResponseStream) -> None:  # noqa: B027 - optional
        """Note the place in the order of a request that the response cache answers."""

    def continues(self, request: InferRequest) -> bool:
        """Whether the request continues an open sequence."""
        return False

    async def sequences_ended(self) -> None:
        """Wait until no sequence is open."""
        return

    async def prepare(self, instance: Instance) -> None:  # noqa: B027 - optional
        """Measure an idle instance, or read files, as scheduling needs; comes before `add`."""

    @abstractmethod
    def add(self, instance: Instance, registration: Registration | None = None) -> None:
        """Execute on this instance; with a registration, only in turns of the rate limiter."""

    @abstractmethod
    def remove(self, instance: Instance, error: InferenceError) -> None:
        """Stop using a dead instance: the requests that it was executing get the error."""

    @abstractmethod
    async def withdraw(self, instance: Instance) -> None:
        """Stop using a living instance; returns after its last execution.

        `remove` may be called meanwhile if it dies.
        """

    @property
    @abstractmethod
    def executions(self) -> Iterable[Execution]:
        """The executions that have not ended."""

    @abstractmethod
    async def run(self) -> None:
        """Own the tasks of the executions until cancelled."""
