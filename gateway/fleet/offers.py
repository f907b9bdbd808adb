"""Announcements of a replica: its state and models, and the load and prefixes of each model."""

from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from gateway.config import ModelConfig
from gateway.config.pbtxt import parse, to_text
from gateway.errors import InferenceError
from gateway.fleet.choice import MOST_REQUESTS, Load, ReplicaState
from gateway.fleet.keys import KEY_BYTES
from gateway.fleet.prefixes import MOST_KEYS_OF_REPLICA, KeyChanges
from gateway.models.model import Model
from gateway.models.sharing import most_of_all
from gateway.rollouts.choice import VersionChoice
from gateway.rollouts.plan import ALL

FIRST_STEP_SECS = 0.05
"""The duration of a request of a model that has answered none."""

_Positive = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
_Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

Key = tuple[str, int]
"""Name and version of a model."""


OF_REPLICAS = (
    "version_policy",
    "batch_input",
    "batch_output",
    "optimization",
    "dynamic_batching",
    "ensemble_scheduling",
    "instance_group",
    "default_model_filename",
    "cc_model_filenames",
    "metric_tags",
    "model_warmup",
    "model_operations",
    "model_repository_agents",
    "model_metrics",
)
"""Fields of a configuration that no request and no decision of a router depends on."""
OF_ROUTERS = ("continue_tries", "openai_names", "replay")
"""Parameters on which some depends; others are for backends and replicas."""
NO_CONFIG = ModelConfig()
MOST_INTERFACES = 4096
"""Configurations whose interfaces are kept: each takes half a millisecond of the event loop."""


class OfferDigests(NamedTuple):
    """Digests of an offer: of its `interface`, which tells uses apart, and of the `whole` of it.

    A router uses all replicas of one interface as one model.
    """

    interface: bytes
    whole: bytes


class ModelOffer(msgspec.Struct, array_like=True, frozen=True):
    """One version of a model; `config` is its completed configuration in the text form.

    `trouble` is the reason why it is not ready, "" if it is. `max_model_len` is 0 without a limit,
    `concurrency` the number of its concurrent executions, `most_in_flight` that of requests that
    it accepts. `loaded_at` is the time of its load (seconds since the epoch), which tells loads
    apart. `names` are the labels of the version. The candidate of a rollout at the replica has a
    `weight` in percent, and the `keys` of its plan. Fields are only added at the end, with
    defaults.
    """

    name: str
    version: _Positive
    config: str
    labels: dict[str, tuple[str, ...]]
    adapters: tuple[str, ...]
    max_model_len: _Natural
    trouble: str
    concurrency: _Positive = 1
    most_in_flight: _Natural = 1024
    loaded_at: float = 0.0
    names: tuple[str, ...] = ()
    weight: Annotated[float, Meta(ge=0, le=ALL)] | None = None
    keys: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        """Name and version."""
        return self.name, self.version

    @property
    def digests(self) -> OfferDigests:
        """The digests of its description, without its state and its room."""
        labels = sorted(self.labels.items())
        whole = (self.config, labels, self.adapters, self.max_model_len)
        interface = _interface(self.config), labels, sorted(self.adapters)
        return OfferDigests(_digest(interface), _digest(whole))


class Offers(msgspec.Struct, array_like=True, frozen=True):
    """The state of a replica, and every version that it has loaded."""

    state: ReplicaState
    models: tuple[ModelOffer, ...] = ()


class _LoadFrame(msgspec.Struct, array_like=True, frozen=True):
    name: str
    version: int
    seen: int
    waiting_tokens: int
    running: int
    queued: int
    prefill_rate: float
    step_secs: float
    kv_used: float
    room: int


class _PrefixesFrame(msgspec.Struct, array_like=True, frozen=True):
    name: str
    version: int
    gained: bytes
    lost: bytes
    reset: bool


LOAD_FIELDS = _LoadFrame.__struct_fields__[2:]
"""The fields of a load that a frame has, in order."""

write_offers = msgspec.msgpack.Encoder().encode
read_offers = msgspec.msgpack.Decoder(Offers).decode
_encode = msgspec.msgpack.Encoder().encode
_load_frame = msgspec.msgpack.Decoder(_LoadFrame).decode
_prefixes_frame = msgspec.msgpack.Decoder(_PrefixesFrame).decode


def _digest(described: object) -> bytes:
    return blake2b(_encode(described), digest_size=16).digest()


@lru_cache(MOST_INTERFACES)
def _interface(text: str) -> str:
    """The configuration without the parts that only replicas read."""
    try:
        config = parse(text, "the configuration of a replica")
    except InferenceError:
        return text
    given = config.parameters.items()
    return to_text(
        replace(
            config,
            parameters={key: value for key, value in given if key in OF_ROUTERS},
            **{name: getattr(NO_CONFIG, name) for name in OF_REPLICAS},
        )
    )


def offer(model: Model, names: tuple[str, ...] = ()) -> ModelOffer:
    """The offer of a loaded model, which has these labels."""
    choice = model.chooser
    if not isinstance(choice, VersionChoice) or choice.candidate is not model:
        choice = None
    adapters = (name for instance in model.instances for name in instance.adapters)
    return ModelOffer(
        name=model.name,
        version=int(model.version),
        config=to_text(model.config),
        labels={output: tuple(labels) for output, labels in model.labels.items()},
        adapters=tuple(dict.fromkeys(adapters)),
        max_model_len=model.max_model_len or 0,
        trouble=model.trouble,
        concurrency=concurrency(model),
        most_in_flight=most_of_all(model.fair, model.most_in_flight),
        loaded_at=model.loaded_at,
        names=names,
        weight=None if choice is None else choice.weight,
        keys=() if choice is None else choice.key_texts,
    )


def concurrency(model: Model) -> int:
    """The number of concurrent executions of a model."""
    return max(1, sum(instance.concurrency or 1 for instance in model.instances))


def first_load(offered: ModelOffer) -> Load:
    """The load of a replica that has announced none for a model that it offers."""
    return load_of_requests(queued=0, step_secs=FIRST_STEP_SECS, room=offered.most_in_flight)


def load_of_requests(*, queued: int, step_secs: float, room: int) -> Load:
    """A load in requests, without tokens."""
    return Load(
        seen=0,
        waiting_tokens=0,
        running=0,
        queued=queued,
        prefill_rate=0.0,
        step_secs=step_secs,
        kv_used=0.0,
        room=max(0, min(MOST_REQUESTS, room)),
        state=ReplicaState.READY,
    )


def write_load(key: Key, load: Load) -> bytes:
    """The payload of a load."""
    return _encode(_LoadFrame(*key, *[getattr(load, name) for name in LOAD_FIELDS]))


def read_load(payload: bytes) -> tuple[Key, Load]:
    """The load that `write_load` encoded; ValueError for one that no replica can have."""
    try:
        found = _load_frame(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"a load cannot be read: {error}") from None
    fields: dict[str, Any] = {name: getattr(found, name) for name in LOAD_FIELDS}
    return (found.name, found.version), Load(**fields, state=ReplicaState.READY)


def write_prefixes(key: Key, changes: KeyChanges) -> bytes:
    """The payload of the changes of the prefixes that a replica holds."""
    return _encode(
        _PrefixesFrame(*key, b"".join(changes.gained), b"".join(changes.lost), changes.reset)
    )


def read_prefixes(payload: bytes) -> tuple[Key, KeyChanges]:
    """The changes that `write_prefixes` encoded; ValueError for others."""
    try:
        found = _prefixes_frame(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"prefixes cannot be read: {error}") from None
    changes = KeyChanges(_keys(found.gained), _keys(found.lost), found.reset)
    return (found.name, found.version), changes


def _keys(joined: bytes) -> list[bytes]:
    """Keys that stand one behind the other; the last one may be too short."""
    if len(joined) > MOST_KEYS_OF_REPLICA * KEY_BYTES:
        most = MOST_KEYS_OF_REPLICA
        raise ValueError(f"found {len(joined) // KEY_BYTES} keys, expected at most {most}")
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]
