"""Directories: the addresses of the replicas of a fleet, in a list, in DNS or in a Ray cluster."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from gateway.fleet.ray_addresses import Correspondent, RayFleet, from_ray
from gateway.settings import FleetSettings, netloc

log = logging.getLogger("sluice.fleet")

Address = tuple[str, int]
Addresses = tuple[Address, ...]
Resolver = Callable[[str, int], Awaitable[Addresses]]
"""Every address of a name; raises OSError or UnicodeError."""

PAUSE_SECS = 2.0
"""Time between an answer of the resolver and the next question."""
ANSWER_SECS = 5.0
"""A resolver that takes longer is logged; the question stays open, as no second one is asked."""


class Listing(NamedTuple):
    """The replicas of a fleet; the `outdated` ones are older than a change of their model."""

    addresses: Addresses
    outdated: frozenset[Address] = frozenset()


Listings = AsyncIterator[Listing]
"""The answers of a directory, also those that are equal to the one before; the last one holds."""


async def resolved(host: str, port: int) -> Addresses:
    """Every address that the system's resolver has for a name, asked in another thread."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys((str(place[0]), port) for *_, place in found))


async def listings(settings: FleetSettings, resolver: Resolver, router: Correspondent) -> Listings:
    """The answers of the directory of the settings, for a router."""
    if settings.ray is not None:
        async for table in from_ray(RayFleet(settings.name, settings.ray), router):
            yield Listing(table.replicas, frozenset(table.outdated))
    elif settings.dns is not None:
        async for addresses in by_name(*settings.dns, resolver):
            yield Listing(addresses)
    else:
        yield Listing(settings.replicas)


async def by_name(host: str, port: int, resolver: Resolver) -> AsyncGenerator[Addresses, None]:
    """The addresses of a name, asked again and again; a failure or an empty answer is left out.

    Each kind of failure is logged once until there is an answer.
    """
    asked: asyncio.Future[Addresses] | None = None
    logged: set[str] = set()
    try:
        while True:
            if asked is None:
                asked = asyncio.ensure_future(resolver(host, port))
            await asyncio.wait((asked,), timeout=ANSWER_SECS)
            found, trouble = _outcome(asked)
            if trouble and trouble not in logged:
                logged.add(trouble)
                about = {"address": netloc(host, port), "reason": trouble}
                log.warning("replicas not looked up", extra=about)
            if found:
                logged.clear()
                yield found
            if asked.done():
                asked = None
                await asyncio.sleep(PAUSE_SECS)
    finally:
        if asked is not None:
            asked.cancel()


def _outcome(asked: asyncio.Future[Addresses]) -> tuple[Addresses, str]:
    """The addresses, or the reason why there are none."""
    if not asked.done():
        return (), f"the resolver has not answered for {ANSWER_SECS:g} s"
    try:
        found = asked.result()
    except (OSError, UnicodeError) as error:
        return (), (isinstance(error, OSError) and error.strerror) or str(error)
    return found, "" if found else "the name has no addresses"
