"""A driver of a Ray cluster: its connection, and the state of the cluster (GCS)."""

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from itertools import dropwhile
from typing import Any

import ray
from ray._raylet import GcsClient
from ray.exceptions import RayError
from ray.util import list_named_actors, placement_group_table

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_addresses import encode
from gateway.json_lines import cut

ROLLOUTS = b"sluice-rollouts"
"""The namespace of the records of rollouts."""
RECORD_SECS = 5.0
NAMESPACE = "sluice"
CONNECT_SECS = 30.0
"""Ray's library tries for longer, and logs the reasons."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
TRACEBACK = re.compile(r"^Traceback\b|^\s+File |\bray::", re.MULTILINE)


class UnreachedError(InferenceError):
    """Ray's library does not reach an actor: it has ended, or is at another place by now."""


class RayState:
    """Implements a part of `Cluster`, for one fleet."""

    def __init__(self, fleet: str) -> None:
        self._fleet_name = fleet
        self._client: GcsClient | None = None

    def draining_nodes(self) -> frozenset[str]:
        """See `Cluster`."""
        return frozenset(self._state.get_draining_nodes())

    def read_record(self, model: str) -> bytes | None:
        """See `RolloutStore`."""
        with unavailable():
            found = self._state.internal_kv_get(self._key(model), ROLLOUTS, timeout=RECORD_SECS)
        return None if found is None else bytes(found)

    def write_record(self, model: str, record: bytes) -> None:
        """See `RolloutStore`."""
        key = self._key(model)
        with unavailable():
            self._state.internal_kv_put(key, record, True, ROLLOUTS, timeout=RECORD_SECS)

    @property
    def _state(self) -> GcsClient:
        if self._client is None:
            self._client = gcs()
        return self._client

    def _key(self, model: str) -> bytes:
        return encode((self._fleet_name, model))


def connect() -> None:
    """Connect this process as a driver, within CONNECT_SECS; UNAVAILABLE with the reason of Ray.

    After that time a thread still tries, until this process ends.
    """
    connected: Future[None] = Future()
    threading.Thread(target=_connect, args=(connected,), daemon=True).start()
    wait((connected,), CONNECT_SECS)
    if not connected.done():
        raise InferenceError(
            Code.UNAVAILABLE,
            f"Ray cannot be used: {place()} has not accepted this process for {CONNECT_SECS:g} s, "
            "expected a head that runs and has its token: compare RAY_ADDRESS with the output of "
            "`ray start`, and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) with that of the head",
        )
    try:
        connected.result()
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        reasons = ": ".join(map(cause, filter(None, (error, error.__cause__))))
        raise InferenceError(Code.UNAVAILABLE, f"Ray cannot be used: {reasons}") from None


def _connect(connected: "Future[None]") -> None:
    try:
        ray.init(
            address="auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # noqa: BLE001 - raised by the thread that waits
        connected.set_exception(error)
    else:
        connected.set_result(None)


def place() -> str:
    """The head of the cluster, for errors."""
    address = os.environ.get("RAY_ADDRESS")
    return (
        f"the head at {address} (RAY_ADDRESS)" if address else "the head of this machine's cluster"
    )


def cause(error: BaseException) -> str:
    """The text of an error of Ray on one line, cut, without tracebacks, coloured or not.

    The name of its class if it has no text.
    """
    text = COLOURS.sub("", str(error)).strip()
    return cut(" ".join(_below_tracebacks(text).split())) or type(error).__name__


def _below_tracebacks(text: str) -> str:
    """The text of the last exception, or the last line if the traceback has none below it."""
    *_, last = (0, *(each.end() for each in TRACEBACK.finditer(text)))
    if not last:
        return text
    below = dropwhile(lambda line: line[:1].isspace(), text[last:].splitlines()[1:])
    return "\n".join(below) or text.splitlines()[-1]


def cluster_id() -> str:
    """The id of the cluster, which is new after a restart without persistence.

    UNAVAILABLE if the cluster does not answer.
    """
    with unavailable():
        return str(gcs().cluster_id.hex())


def found_cluster() -> str:
    """The id of the cluster at the address of this one, "" if it does not answer."""
    with suppress(InferenceError):
        return cluster_id()
    return ""


def controller_name(fleet: str) -> str:
    """The name of the actor of a controller."""
    return f"sluice:{fleet}"


def prefix(fleet: str) -> str:
    """The beginning of the names of replicas."""
    return f"{controller_name(fleet)}:"


def replica_names(fleet: str) -> list[str]:
    """The names of the actors of replicas."""
    actors = list_named_actors(all_namespaces=True)
    named = [each["name"] for each in actors if each["namespace"] == NAMESPACE]
    return [name for name in named if name.startswith(prefix(fleet))]


def described(fleet: str, name: str) -> tuple[str, str]:
    """The model of a replica and its description, which are parts of its name."""
    model, _, own = name.removeprefix(prefix(fleet)).rpartition(":")
    return model, own.rpartition("-")[0]


def groups(fleet: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The names and descriptions of the placement groups of replicas."""
    for group in placement_group_table().values():
        if group["name"].startswith(prefix(fleet)) and group["state"] != "REMOVED":
            yield group["name"], group


def gcs() -> GcsClient:
    """The client of the cluster's state: Ray has no public way to ask for some of it."""
    return GcsClient(address=ray.get_runtime_context().gcs_address)


@contextmanager
def unavailable() -> Iterator[None]:
    """Raise UNAVAILABLE for an error of the state of the cluster."""
    try:
        yield
    except (RayError, RuntimeError) as error:
        text = f"the state of the cluster does not answer: {cause(error)}"
        raise InferenceError(Code.UNAVAILABLE, text) from None
