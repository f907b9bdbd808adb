"""The parts of others in single requests: choices of taps, interceptors, wakers."""

from typing import Protocol

from gateway.messages import InferRequest
from gateway.observability.accounts import Passing
from gateway.observability.stream_tap import Tap
from gateway.schedulers.execution import Entry
from gateway.schedulers.scheduler import Scheduler
from gateway.stream import ResponseStream


class Tapper(Protocol):
    """Chooses the requests of a model that it observes."""

    def tap(self, request: InferRequest, tap: Tap | None) -> Tap | None:
        """The tap of a request, around another one if there is one."""

    def end(self, reason: str) -> None:
        """End the observation: the model gets no more requests. Idempotent."""


class Interceptor(Tap, Protocol):
    """The innermost tap of a request; it decides when the accepted request enters the scheduler."""

    def submit(self, entry: Entry, scheduler: Scheduler) -> None:
        """Submit the request now or later, or end its stream. Must not raise."""


class Allowed(Passing, Protocol):
    """The account of requests that need no look at the limits of their tenant."""

    def admits(self, request: InferRequest) -> bool:
        """Whether a request is one of them; if so, it has cost one request."""

    def end(self) -> None:
        """Have each request looked at from now on; the model and the tenant have it no more."""


class Waking(Protocol):
    """Wakes a version that is asleep."""

    def check(self) -> None:
        """Raise RetryLater if a request cannot wait for it."""

    def wish(self, stream: ResponseStream) -> None:
        """Wake it for a request that has been queued."""
