"""The routers of a fleet that listen for one another, as their replicas announce them."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.fleet.accepting import MOST_ROUTERS
from gateway.fleet.handshake import FleetId, Hello
from gateway.fleet.keys import rendezvous
from gateway.policy.caller import is_this_machine

Place = tuple[str, int]
"""A host and a port."""


class _Row(msgspec.Struct, array_like=True):
    id: FleetId
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65_535)]


_Table = Annotated[list[_Row], Meta(max_length=MOST_ROUTERS)]

_write = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(_Table).decode


def write_table(links: Iterable[tuple[Hello | None, str]]) -> bytes:
    """The table of connected routers, each by its HELLO and the address of its end."""
    return _write([_Row(each.id, host, each.port) for each, host in links if each is not None])


def read_table(payload: bytes, replica_host: str) -> dict[str, Place]:
    """The places of routers by their ids, from a replica at a host; DecodeError for other bytes.

    A router on the machine of the replica is at the host of the replica, as seen from here.
    """
    return {
        each.id: (replica_host if is_this_machine(each.host) else each.host, each.port)
        for each in _read(payload)
    }


class RouterTable:
    """The routers besides this one that listen, by the tables of all connected replicas.

    `on_change` gets the places of each: several, if replicas see it at different ones.
    """

    def __init__(self, own_id: str, on_change: Callable[[Mapping[str, list[Place]]], None]) -> None:
        self._own_id = own_id
        self._on_change = on_change
        self._tables: dict[Hashable, Mapping[str, Place]] = {}

    def take(self, replica: Hashable, table: Mapping[str, Place]) -> None:
        """Replace the table of a replica; that of a dropped one is empty."""
        if table:
            self._tables[replica] = table
        elif self._tables.pop(replica, None) is None:
            return
        places: dict[str, list[Place]] = {}
        for each in self._tables.values():
            for router_id, place in each.items():
                known = places.setdefault(router_id, [])
                if place not in known:
                    known.append(place)
        places.pop(self._own_id, None)
        self._on_change(places)


def owner_of(tenant: str, key: str, router_ids: Iterable[str]) -> str:
    """The router that has an idempotency key of a tenant; every router finds the same one."""
    return rendezvous(f"{tenant}\n{key}".encode("utf-8", "replace"), router_ids)[0]
