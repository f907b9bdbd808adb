"""The loads and prefixes of the models of a replica, sent to its routers when they have changed."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Protocol

from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.fleet.choice import MOST_REQUESTS, Load
from gateway.fleet.meter import LoadMeter, MeteredPrompt
from gateway.fleet.offers import Key
from gateway.fleet.prefixes import KeyChanges
from gateway.messages import RoutedPrompt
from gateway.models.model import Model

LOAD_SECS, PROMPT_SECS = 0.05, 0.005
"""The longest time from a change to its announcement, and from the arrival of a prompt: the other
routers send theirs elsewhere then."""


class Informed(Protocol):
    """The connection of a router."""

    @property
    def agreed(self) -> bool:
        """Whether the handshake is over."""

    def announce(self, key: Key, meter: LoadMeter, load: Load, changes: KeyChanges) -> None:
        """Send the load of a model, and its changed prefixes: all, if the router has others."""


class LoadAnnouncer:
    """Meters of the loaded models; changes go to all `links`.

    They are sent at most 20 times a second, and those with a new prompt at most 200 times.
    `arriving` has the requests that are not submitted yet, with their models; they count as queued.
    """

    def __init__(self, dataplane: DataPlane, links: Collection[Informed]) -> None:
        self._dataplane = dataplane
        self._links = links
        self.arriving: dict[object, Key] = {}
        self._meters: dict[Key, LoadMeter] = {}
        self._changed: set[Key] = set()
        self._sending: asyncio.TimerHandle | None = None

    def meter(self, model: Model) -> LoadMeter:
        """The meter of a loaded model."""
        key = model.name, int(model.version)
        found = self._meters.get(key)
        if found is None or found.model is not model:
            found = self._meters[key] = LoadMeter(model, partial(self.change, key))
        return found

    def _meter(self, key: Key) -> LoadMeter:
        """The meter of a loaded model; InferenceError for others."""
        return self.meter(self._dataplane.model(key[0], str(key[1])))

    def change(self, key: Key) -> None:
        """Send the load of a model soon."""
        self._changed.add(key)
        if self._sending is None:
            self._sending = asyncio.get_running_loop().call_later(LOAD_SECS, self._send)

    def begin(self, key: Key, prompt: RoutedPrompt) -> MeteredPrompt:
        """Count a prompt that has arrived, and send the load of its model very soon."""
        loop = asyncio.get_running_loop()
        self._changed.add(key)
        due = loop.time() + PROMPT_SECS
        if self._sending is None or self._sending.when() > due:
            self.stop()
            self._sending = loop.call_at(due, self._send)
        return self._meter(key).begin(prompt)

    def announce_tokens(self) -> None:
        """Send the loads and prefixes of all models with tokens soon, for a new router."""
        for key, meter in self._meters.items():
            if meter.has_tokens:
                self.change(key)

    def forget_unloaded(self) -> None:
        """Forget the models that are no longer loaded."""
        loaded = set(self._dataplane.models())
        self._meters = {k: each for k, each in self._meters.items() if each.model in loaded}

    def stop(self) -> None:
        """Send no more."""
        if self._sending is not None:
            self._sending.cancel()

    def _send(self) -> None:
        self._sending = None
        changed, self._changed = self._changed, set()
        for key in changed:
            try:
                meter = self._meter(key)
            except InferenceError:  # it has been unloaded
                continue
            load, changes = self._load(key, meter), meter.take_prefixes()
            for link in self._links:
                if link.agreed:
                    link.announce(key, meter, load, changes)

    def _load(self, key: Key, meter: LoadMeter) -> Load:
        """The load of a model, with the requests that are arriving."""
        load, count = meter.load(), sum(each == key for each in self.arriving.values())
        queued, room = min(MOST_REQUESTS, load.queued + count), max(0, load.room - count)
        return replace(load, queued=queued, room=room)
