"""Rollouts on Ray: the controller decides for all replicas, and keeps the state in the cluster."""

import logging
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Protocol

import msgspec

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_news import HeardNews, RolloutAnswer, RolloutRequest
from gateway.fleet.ray_repository import LeftOut, ModelFiles
from gateway.fleet.ray_rollout import FleetRecord, FleetRollout
from gateway.rollouts.changes import ChangeableRollouts, RolloutAction, read_beginning
from gateway.rollouts.rollout import Rollout
from gateway.rollouts.state import FORMAT

log = logging.getLogger("sluice.fleet")

SAVE_SECS = 10.0
"""Time between two writes of an open rollout without transitions."""
MOST_ANSWERS = 100
"""The latest answers that no router asks for any more, and routers get."""
DAMAGED = "/damaged"
"""The copy of a record that cannot be read has this after the model's name, which has no slash."""


class _Format(msgspec.Struct):
    format: int


class RolloutStore(Protocol):
    """The records of rollouts in the state of a cluster; each call raises InferenceError."""

    def read_record(self, model: str) -> bytes | None:
        """The record of a model, if there is one."""

    def write_record(self, model: str, record: bytes) -> None:
        """Replace the record of a model."""


class FleetRollouts(ChangeableRollouts):
    """The rollouts of all models on Ray; `heard` has the counts and requests of routers."""

    def __init__(self, store: RolloutStore, heard: HeardNews, clock: Callable[[], float]) -> None:
        self._store = store
        self._heard = heard
        self._clock = clock
        self._models: dict[str, FleetRollout] = {}
        self._unknown: set[str] = set()
        self._held: Mapping[str, str] = {}
        self._present: Set[str] = frozenset()

    def of(self, model: str) -> FleetRollout | None:
        """The rollouts of a model."""
        return self._models.get(model)

    @property
    def left_out(self) -> LeftOut:
        """The versions that replicas do not load."""
        return LeftOut(
            {name: {*each.refused} for name, each in self._models.items() if each.refused},
            {name: each.candidates for name, each in self._models.items() if each.candidates},
            frozenset(self._unknown),
        )

    def read(self, models: Iterable[str]) -> Mapping[str, str]:
        """Have the records of models; the reasons why some are held. Raises InferenceError."""
        held: dict[str, str] = {}
        for model in models:
            if model in self._models:
                continue
            kept = self._store.read_record(model)
            try:
                record = FleetRecord(model=model) if kept is None else _read(kept)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.error("rollout damaged", extra={"model": model, "reason": str(error)})
                self._store.write_record(model + DAMAGED, kept or b"")
                record = FleetRecord(model=model)
                self._unknown.add(model)
            if isinstance(record, str):
                held[model] = record
                if model not in self._held:
                    log.error("rollout not read", extra={"model": model, "reason": record})
            else:
                self._models[model] = FleetRollout(record, is_kept=kept is not None)
        self._held = held
        return held

    def follow(
        self, files: Mapping[str, ModelFiles | str], descriptions: Mapping[str, Set[str]]
    ) -> None:
        """Take the files of the models, whose replicas have these descriptions."""
        self._present = files.keys()
        for model, found in files.items():
            if isinstance(found, str):
                continue
            of_model = self._models[model]
            if model in self._unknown:
                self._unknown.remove(model)
                known = found.by_description.keys() & descriptions.get(model, frozenset())
                of_model.record.stable = min(
                    map(found.by_description.__getitem__, known), default=0
                )
                of_model.dirty = True
            of_model.follow(found)

    def hear(self) -> None:
        """Take the requests of routers that are new, and their counts."""
        changes = self._heard.changes()
        asked = {each.id for each in changes}
        for change in changes:
            of_model = self._models.get(change.model)
            if of_model is not None and change.id not in of_model.record.answers:
                answers = {**of_model.record.answers, change.id: self._answer(of_model, change)}
                dropped = [each for each in answers if each not in asked][:-MOST_ANSWERS]
                of_model.record.answers = {n: a for n, a in answers.items() if n not in dropped}
                has_record = of_model.is_kept or of_model.record.rollout is not None
                of_model.dirty = of_model.dirty or has_record
        for model, of_model in self._models.items():
            if of_model.evidence is not None:
                of_model.evidence.take(self._heard.evidence(model, of_model.evidence_id))

    def save(self) -> None:
        """Save what has changed, and open rollouts every SAVE_SECS; a failure is retried."""
        now = self._clock()
        for model, each in self._models.items():
            is_open = each.open is not None and model in self._present
            is_time = is_open and now - each.saved_at >= SAVE_SECS
            if not (each.dirty or is_time):
                continue
            each.saved_at = now
            try:
                self._store.write_record(model, each.encoded())
                each.is_kept = True
            except InferenceError as error:
                each.dirty = True
                log.error("rollout not kept", extra={"model": model, "reason": error.message})

    def _answer(self, of_model: FleetRollout, change: RolloutRequest) -> RolloutAnswer:
        try:
            if change.action is RolloutAction.START:
                of_model.start(read_beginning(change.members), change.by)
            else:
                self.change(change.model, change.action, change.members, change.by)
        except InferenceError as error:
            return RolloutAnswer(error.message, error.code)
        return RolloutAnswer()

    def _change(self, name: str, change: Callable[[Rollout], None]) -> None:
        of_model = self._models[name]
        if of_model.record.rollout is None:
            raise InferenceError(Code.INVALID_ARG, f"model '{name}' has no rollout")
        change(of_model.record.rollout)
        of_model.changed()


def _read(kept: bytes) -> FleetRecord | str:
    """The record, or the reason why it is that of another release; DecodeError if damaged."""
    found = msgspec.json.decode(kept, type=_Format).format
    if found != FORMAT:
        return f"the state of its rollouts has format {found}, expected {FORMAT}"
    return msgspec.json.decode(kept, type=FleetRecord)
