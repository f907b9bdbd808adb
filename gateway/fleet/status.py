"""The status of a router and of a replica: `GET /v2/fleet`, and the metrics of their pages."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from gateway.backend import MetricReading
from gateway.fleet.choice import ANY_REQUEST, ReplicaState, wait
from gateway.fleet.connection import SILENT_SECS, ReplicaConnection
from gateway.fleet.handshake import Identity
from gateway.fleet.instance import FleetInstance
from gateway.fleet.metrics import DIRECTORY_AGE, NEED, REPLICAS, WAITING, FleetPage
from gateway.fleet.offers import Key

LOST, SILENT = "LOST", "SILENT"
"""The states of a replica that is not connected, and of one that has sent nothing for a while."""
DIGITS = 4
SEQUENCES, CONVERSATIONS = "open_sequences", "open_conversations"

Refusal = Callable[[ReplicaConnection, Key], str]
"""The reason why a router does not use the offer of a model; "" if it does."""
Instances = Mapping[Key, FleetInstance]
Opened = Callable[..., dict[str, int]]
"""The open sequences and conversations at a replica: of the model of that key, or of all."""


def own_status(identity: Identity) -> dict[str, Any]:
    """The members that routers and replicas have in common."""
    return {"fleet": identity.fleet, "id": identity.id, "role": identity.role.value}


def rounded(secs: float | None) -> float | None:
    """A time with the digits that a person reads."""
    return None if secs is None else round(secs, DIGITS)


def router_status(
    identity: Identity,
    connections: Collection[ReplicaConnection],
    instances: Instances,
    refusal: Refusal,
) -> dict[str, Any]:
    """The members of `GET /v2/fleet` at a router."""
    pins: defaultdict[ReplicaConnection, dict[Key, int]] = defaultdict(dict)
    for key, instance in instances.items():
        for replica, count in instance.placement.pinned().items():
            pins[replica][key] = count
    rows = [_row(each, refusal, partial(_opened, instances, pins[each])) for each in connections]
    models = [_placed(key, each) for key, each in instances.items()]
    return {**own_status(identity), "replicas": rows, "models": models}


def _placed(key: Key, instance: FleetInstance) -> dict[str, Any]:
    """One version at all replicas, also without any; `reason` says why none comes."""
    return {
        "name": key[0],
        "version": str(key[1]),
        "ready": len(instance.placement.targets()),
        "waiting": len(instance.room),
        "expected_start_secs": rounded(instance.counts.start_secs),
        "reason": instance.room.reason or "",
    }


def router_families(
    connections: Collection[ReplicaConnection],
    instances: Instances,
    directory_age_secs: float | None,
) -> list[MetricReading]:
    """The metrics of a router; a list of addresses has no age."""
    page = FleetPage()
    if directory_age_secs is not None:
        page.add(DIRECTORY_AGE, directory_age_secs)
    states = Counter(map(_state, connections))
    for state in (*ReplicaState, SILENT, LOST):
        page.add(REPLICAS, states[state], state=state.lower())
    for each in connections:
        page.add_replica(each.address, each.counts)
    for key, instance in instances.items():
        page.add_model(*key, instance.counts, len(instance.placement.targets()))
        labels = {"model": key[0], "version": str(key[1])}
        if instance.room.goes_to_zero:
            page.add(WAITING, len(instance.room), **labels)
            page.add(NEED, instance.room.need, **labels)
    return page.families()


def _state(replica: ReplicaConnection) -> str:
    if replica.state is None or replica.silent_secs is None:
        return LOST
    if not replica.has_both:
        return ReplicaState.STARTING
    return SILENT if replica.silent_secs > SILENT_SECS else replica.state


def _opened(instances: Instances, pins: Mapping[Key, int], *keys: Key) -> dict[str, int]:
    """The numbers of those at a replica, by its pins; of these models, or of all."""
    found = dict.fromkeys((SEQUENCES, CONVERSATIONS), 0)
    for key in keys or pins:
        if count := pins.get(key, 0):
            found[CONVERSATIONS if instances[key].placement.converses else SEQUENCES] += count
    return found


def _row(replica: ReplicaConnection, refusal: Refusal, opened: Opened) -> dict[str, Any]:
    state = _state(replica)
    return {
        "address": replica.address,
        "id": replica.id,
        "state": state,
        "reason": replica.trouble if state == LOST else "",
        "silent_secs": rounded(replica.silent_secs),
        **opened(),
        "models": [
            {**_model(replica, key, refusal(replica, key)), **opened(key)} for key in replica.models
        ],
    }


def _model(replica: ReplicaConnection, key: Key, refused: str) -> dict[str, Any]:
    """One version at a replica, with the load that it has announced and the router's own calls."""
    known = replica.loads[key]
    return {
        "name": key[0],
        "version": str(key[1]),
        "trouble": replica.models[key].trouble,
        "refused": refused,
        "in_flight": len(known.open_calls),
        "room": known.room,
        "running": known.load.running,
        "queued": known.load.queued,
        "expected_wait_secs": rounded(wait(known, ANY_REQUEST)),
    }
