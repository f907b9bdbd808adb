"""The state of a Ray cluster (GCS): nodes that drain, and records of rollouts."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._raylet import GcsClient
from ray.exceptions import RayError

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_addresses import encode

ROLLOUTS = b"sluice-rollouts"
"""The namespace of the records of rollouts."""
RECORD_SECS = 5.0


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
        with _unavailable():
            found = self._state.internal_kv_get(self._key(model), ROLLOUTS, timeout=RECORD_SECS)
        return None if found is None else bytes(found)

    def write_record(self, model: str, record: bytes) -> None:
        """See `RolloutStore`."""
        key = self._key(model)
        with _unavailable():
            self._state.internal_kv_put(key, record, True, ROLLOUTS, timeout=RECORD_SECS)

    @property
    def _state(self) -> GcsClient:
        if self._client is None:
            self._client = gcs()
        return self._client

    def _key(self, model: str) -> bytes:
        return encode((self._fleet_name, model))


def gcs() -> GcsClient:
    """The client of the cluster's state: Ray has no public way to ask for some of it."""
    return GcsClient(address=ray.get_runtime_context().gcs_address)


@contextmanager
def _unavailable() -> Iterator[None]:
    """Raise UNAVAILABLE for an error of the state of the cluster."""
    try:
        yield
    except (RayError, RuntimeError) as error:
        text = f"the state of the cluster does not answer: {error}"
        raise InferenceError(Code.UNAVAILABLE, text) from None
