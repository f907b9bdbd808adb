"""Requests that pass a fair queue without a look each, while nothing is scarce in it."""

import time
from collections.abc import Mapping
from weakref import ref

from gateway.messages import Phases, Usage
from gateway.observability.accounts import TenantsInFlight
from gateway.observability.request_record import Record
from gateway.policy.tenants import MOST_TIMES, Tenants
from gateway.schedulers.charges import COMPUTE, Charges
from gateway.schedulers.service import WASTED, PlaceOwner, Service, part_ms
from gateway.schedulers.shares import ActiveTenants
from gateway.stream import ResponseStream

LEAST_IN_FLIGHT = 16
"""Requests that any tenant may have in flight."""
AT_ONCE = 64
"""The most requests that pass between two looks."""


class Window:
    """The places of a fair queue: the `room` of its instances, those `taken`, and what waits.

    A request takes one, or one for each of its rows if they are `of_rows`.
    """

    __slots__ = ("of_rows", "room", "taken", "waiting")

    def __init__(self, waiting: Mapping[str, object], *, of_rows: bool) -> None:
        self.waiting = waiting
        self.of_rows = of_rows
        self.room = self.taken = 0.0


class Passages:
    """The common part of the passages of a queue.

    It does not keep its owner alive: a receipt that is kept has a passage, and holds no scheduler.
    """

    def __init__(
        self,
        owner: PlaceOwner,
        window: Window,
        charges: Charges,
        tenants: Tenants,
    ) -> None:
        self.owner, self.window = ref(owner), window
        self.charges, self.tenants = charges, tenants
        self.active = ActiveTenants()

    def allowed(self, tenant: str, most: int, now_ns: int) -> int:
        """The requests that a tenant may have in flight of `most`, its share at this time.

        The time is one of `time.perf_counter_ns`, as of records.
        """
        share = self.active.share(tenant, self.tenants.weight(tenant), now_ns)
        return _part(share, most)


class Passage:
    """The requests of one tenant that pass; a number are `left`. Implements `PassingReader`.

    What happens to them is noted, and taken into account in the same order, so that shares and
    places are those of requests with a service of their own. One with tokens, or whose instance is
    free before its end, gets its own.
    """

    __slots__ = (
        "_all",
        "_charges",
        "_in_flight",
        "_kind",
        "_requests",
        "label",
        "left",
        "noted",
        "row_ms",
        "tenant",
        "window",
    )

    def __init__(
        self,
        passages: Passages,
        tenant: str,
        in_flight: TenantsInFlight,
        requests: Mapping[Record, ResponseStream],
    ) -> None:
        self._all, self._charges, self.window = passages, passages.charges, passages.window
        self._in_flight, self._requests = in_flight, requests
        self.noted = passages.charges.ledger.events
        self.row_ms = passages.charges.costs.row_ms
        self.tenant, self.label = tenant, passages.tenants.label(tenant)
        self._kind = self.label, COMPUTE
        self.left = 0

    def room(self, most: int) -> int:
        """The requests that would pass now; the tenant has its share of `most` in flight."""
        window, passages = self.window, self._all
        if window.waiting or self._charges.costs.has_tokens:
            return 0
        others = sum(each.left for each in self._charges.granted if each.left > 0)
        places, of_all = window.room - window.taken, MOST_TIMES * most - len(self._requests)
        weight = passages.tenants.weight(self.tenant)
        share = passages.active.possible_share(self.tenant, weight, time.perf_counter_ns())
        own = _part(share, most) - self._in_flight.get(self.tenant, 0)
        return int(min(AT_ONCE, own, places - others, of_all - others))

    def grant(self, count: int) -> None:
        """Let a count of requests pass, no more than there is `room` for."""
        owner = self._all.owner()
        if owner is not None:
            owner.notice_changes()  # of rules whose first request was refused before the queue
        self.left = count
        if self not in self._charges.granted:
            self._charges.granted.append(self)

    def take(self, count: int) -> None:
        """See `PassingReader`; without as many left, others pass no more by the same places."""
        if self.window.of_rows:
            self.left -= count
            if self.left < 0:
                self._charges.revoke()

    def look_behind(self, record: Record) -> None:
        """Release others, which wait by now, once a request that ends has ended."""
        owner = self._all.owner()
        if owner is not None:
            self._requests[record].on_end = owner.look

    def follow(self, record: Record) -> None:
        """Give a request that has not ended a service of its own."""
        self._charges.revoke()
        stream, owner = self._requests.get(record), self._all.owner()
        if stream is not None and owner is not None and record.reader is self:
            service = Service(owner, self._charges, record, self.tenant, self.label)
            service.estimate, service.is_released = record.booked[2], True
            service.places = service.rows if self.window.of_rows else 1
            record.reader, record.tenant = service, self.tenant
            stream.on_end = service.ended

    # Of what is noted.

    def passes_on(self, service: float, at_ns: int) -> None:
        """Charge its tenant for service; from now on requests of the tenant are the last ones.

        The tenant had a request at a time of `time.perf_counter_ns`.
        """
        passages, shares = self._all, self._charges.shares
        passages.active.note(self.tenant, passages.tenants.weight(self.tenant), at_ns)
        shares.charge(self.tenant, service)
        shares.pass_on(self.tenant)

    def charge(self, service: float, ms: float, passed: int = 0) -> None:
        """Charge its tenant for service, of which that time was executed; some have passed."""
        charges = self._charges
        charges.shares.charge(self.tenant, service)
        if ms:
            charges.totals.service[self._kind] += ms  # type: ignore[assignment]  # no whole one
        charges.totals.waits.counts[0] += passed  # as `observe(0)` of each

    def entered(self, rows: int) -> None:
        """Count a request as one in flight, which has its places."""
        self._in_flight[self.tenant] = self._in_flight.get(self.tenant, 0) + 1
        self.window.taken += rows if self.window.of_rows else 1

    def left_by(self, rows: int) -> None:
        """Count a request no more that had entered."""
        self._in_flight.ended(self.tenant)
        self.window.taken -= rows if self.window.of_rows else 1

    # TokenReader.

    def executed(self, record: Record, phases: Phases, rows: int) -> None:
        """See `TokenReader`."""
        own = record.batch_size or 1
        ms = part_ms(phases, own, rows)
        self._charges.ledger.settle()
        self.charge(self._charges.costs.computed(ms, own) - record.booked[2], ms)
        record.booked[2] = 0.0

    def counted(self, record: Record, usage: Usage | None) -> None:
        """See `TokenReader`."""
        self.follow(record)
        if record.reader is not None and record.reader is not self:
            record.reader.counted(record, usage)

    def freed(self, record: Record) -> None:
        """See `TokenReader`."""
        self.follow(record)
        if record.reader is not None and record.reader is not self:
            record.reader.freed(record)

    def wasted(self, usage: Usage) -> None:
        """See `TokenReader`."""
        self._charges.wrote(self.tenant, self.label, WASTED, usage.completion_tokens)


def _part(share: float, most: int) -> int:
    """The requests of a tenant with a share of `most`."""
    return max(LEAST_IN_FLIGHT, int(share * most))
