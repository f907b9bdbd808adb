"""The fair queue of a version, on a server with a key file."""

from collections.abc import Mapping
from typing import Protocol

from gateway.backend import MetricReading
from gateway.config import ModelConfig
from gateway.errors import Refusal
from gateway.messages import InferRequest
from gateway.models.limits import TokenWeights
from gateway.observability.accounts import TenantsInFlight
from gateway.observability.request_record import Record
from gateway.policy.tenants import MOST_TIMES, Tenants
from gateway.schedulers.passages import Passage
from gateway.schedulers.scheduler import Scheduler
from gateway.stream import ResponseStream


class Sharing(Protocol):
    """The part of `FairScheduler` that is no scheduler's; few servers import it.

    `inner` is the scheduler behind it, which gets the requests that pass.
    """

    tenants: Tenants
    inner: Scheduler

    @property
    def slack(self) -> int:
        """The requests that it releases beyond the places of the instances."""

    def refusal(self, request: InferRequest, most: int, total: int) -> Refusal | None:
        """The refusal of a tenant that has its share of `most` requests in flight.

        A share is that of the tenants with a request in the last minute. `total` are in flight.
        """

    def passage(self, tenant: str, requests: Mapping[Record, ResponseStream]) -> Passage | None:
        """A passage of a tenant until rules change; None if its requests need a look each."""

    def waiting(self, tenant: str) -> int:
        """The number of requests of a tenant that wait in front of the scheduler."""

    def families(self, labels: Mapping[str, str]) -> list[MetricReading]:
        """The metrics of tenants, with these labels of the model."""


def in_force(sharing: Sharing | None) -> Sharing | None:
    """The fair queue of a version while a tenant has rules, so that tenants have shares."""
    return sharing if sharing is not None and sharing.tenants.configured else None


def most_of_all(sharing: Sharing | None, most: int) -> int:
    """The requests of all tenants together that a model accepts, whose limit is `most`."""
    return most if in_force(sharing) is None else MOST_TIMES * most


def shared_among(
    tenants: Tenants, inner: Scheduler, config: ModelConfig, in_flight: TenantsInFlight
) -> tuple[Scheduler, Sharing]:
    """A fair queue in front of a scheduler, as a scheduler and by its other part.

    It is there from the load on, so that rules count as soon as the key file gets them. `in_flight`
    are the requests of each tenant, wherever they are.
    """
    from gateway.schedulers.fair import FairScheduler
    from gateway.schedulers.shares import Costs

    weights = TokenWeights.read(config)
    costs = Costs(weights.prompt, weights.output)
    found = FairScheduler(inner, config, tenants, costs, in_flight)
    return found, found
