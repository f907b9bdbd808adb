"""The CPU cores that an instance keeps to, by the host policy of its group."""

import logging
from collections.abc import Mapping

from gateway.backend import Backend
from gateway.config import InstanceKind, ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.instance_slots import Place

log = logging.getLogger("sluice.loads")

Policies = Mapping[str, frozenset[int]]
EVERY_CORE: frozenset[int] = frozenset()


def cores_of(
    place: Place, config: ModelConfig, backend: Backend, policies: Policies
) -> frozenset[int]:
    """The cores of a place's instance, none for all of them.

    Raises UNSUPPORTED if its policy names some and its backend cannot keep to them.
    """
    name = place.group.host_policy or _default(place)
    cores = policies.get(name, EVERY_CORE)
    if place.group.host_policy and not cores:
        extra = {"model": config.name, "host_policy": name}
        log.warning("host policy without settings", extra=extra)
    if cores and not backend.keeps_to_cores:
        raise InferenceError(
            Code.UNSUPPORTED,
            f"instance group '{place.group.name}' of model '{config.name}' has host policy "
            f"'{name}', but instances of its backend '{config.backend or config.platform}' cannot "
            "keep to CPU cores: give the group another host_policy",
        )
    return cores


def _default(place: Place) -> str:
    """The name of the policy of a group that names none, as on Triton."""
    if place.group.kind is InstanceKind.KIND_GPU:
        return f"gpu_{place.device}"
    return "model" if place.group.kind is InstanceKind.KIND_MODEL else "cpu"
