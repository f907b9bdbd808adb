"""Concurrent loads of a model's versions, and the rules for keeping loaded ones."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.ensemble_members import members
from gateway.models.loading import NO_MEMBERS, InPlaceUpdate, LoadedMembers, ModelLoader
from gateway.models.model import Model
from gateway.models.model_folder import without_configs
from gateway.models.repository import LoadSource
from gateway.models.table import KnownModel

log = logging.getLogger("sluice.loads")

Loaded = Model | InPlaceUpdate
"""A newly loaded version, or an in-place update of a loaded one."""


class VersionLoads:
    """Loads versions, at most `at_once` concurrently in the whole server.

    A failed load of a version is repeated up to `retries` times.
    """

    def __init__(self, loader: ModelLoader, at_once: int, retries: int) -> None:
        self._loader = loader
        self._slots = asyncio.Semaphore(at_once)
        self._retries = retries

    async def load(
        self,
        source: LoadSource,
        versions: Sequence[int],
        kept: Mapping[int, Model],
        members: LoadedMembers = NO_MEMBERS,
    ) -> Mapping[int, Loaded | InferenceError]:
        """Each version, or its error. If cancelled, nothing stays loaded.

        The versions in `kept` only get the instance groups of the source. `members` are the models
        that an ensemble calls; a failed load with members is not retried.
        """
        outcomes: dict[int, Loaded | InferenceError] = {}

        async def load_one(version: int) -> None:
            async with self._slots:
                load = partial(self._load, source, version, kept.get(version), members)
                outcomes[version] = await self._with_retries(load, 0 if members else self._retries)

        try:
            async with asyncio.TaskGroup() as tasks:
                for version in versions:
                    tasks.create_task(load_one(version))
        except BaseException:
            await close_all(outcomes.values())
            raise
        return outcomes

    async def _with_retries(
        self, load: Callable[[], Awaitable[Loaded | InferenceError]], retries: int
    ) -> Loaded | InferenceError:
        outcome = await load()
        for _ in range(retries):
            if not isinstance(outcome, InferenceError):
                break
            outcome = await load()
        return outcome

    async def _load(
        self, source: LoadSource, version: int, kept: Model | None, members: LoadedMembers
    ) -> Loaded | InferenceError:
        extra = {"model": source.config.name, "version": version}
        log.info("loading model", extra=extra)
        began = time.monotonic()
        try:
            if kept is not None:
                loaded: Loaded = await self._loader.update(kept, source)
            else:
                loaded = await self._loader.load(source, version, members)
        except InferenceError as error:
            return _logged(error, extra)
        except Exception:
            # Around one model load: a runtime's own exception must not end the other loads.
            log.exception("loading failed", extra=extra)
            text = "loading failed unexpectedly; the server's log says why"
            return _logged(InferenceError(Code.INTERNAL, text), extra)
        log.info("model ready", extra=extra | {"secs": round(time.monotonic() - began, 1)})
        return loaded


async def close_all(outcomes: Iterable[Loaded | InferenceError]) -> None:
    """Close loaded versions that will not serve; all of them, even if cancelled."""
    ends = [each.close() for each in outcomes if not isinstance(each, InferenceError)]
    await asyncio.gather(*ends)


def _logged(error: InferenceError, extra: Mapping[str, object]) -> InferenceError:
    log.error("model load failed", extra={**extra, "reason": error.reason})
    return error


def is_served(known: KnownModel, source: LoadSource) -> bool:
    """Whether every version of the source serves and was loaded from the same files."""
    served = known.source
    if served is None or source.overridden or served.overridden:
        return False
    return served.snapshot == source.snapshot and all(model.ready for model in known.models)


def unchanged_versions(known: KnownModel, source: LoadSource) -> Mapping[int, Model]:
    """The loaded versions that need only other instances (in-place update).

    None is kept for a client's config that is equal to the served one: it asks for a reload.
    """
    served = known.source
    if served is None or served.upload or source.upload or members(source.config):
        return {}
    if without_configs(served.snapshot) != without_configs(source.snapshot):
        return {}
    if source.overridden and source.config == served.config:
        return {}
    if _without_instances(source.config) != _without_instances(served.config):
        return {}
    return {int(model.version): model for model in known.models if model.ready}


def _without_instances(config: ModelConfig) -> ModelConfig:
    return replace(config, instance_group=(), version_policy=None)
