"""Configurations, polls and versions of models in object storage, for tests."""

from collections.abc import Callable

from gateway.models.registry import ModelRegistry
from gateway.models.repository_control import RepositoryControl
from gateway.settings import ControlMode
from gateway.storage.mirror.mirror import Mirror
from tests.builders import soon
from tests.registries import CONFIG

POLL = {"control_mode": ControlMode.POLL, "poll_secs": 3600}
EXPLICIT = {"control_mode": ControlMode.EXPLICIT}
SOON_SECS = 30

Open = Callable[..., Mirror]


def config(more: str = "") -> bytes:
    return CONFIG.format(backend="scripted", more=more).encode()


async def polled(control: RepositoryControl, times: int = 2) -> None:
    for _ in range(times):
        await soon(control.poll())


def versions(registry: ModelRegistry, name: str) -> list[str]:
    return [model.version for known in registry.named(name) for model in known.models]
