"""The choice of the version for each request of a model with a rollout."""

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol

from gateway.backend import MetricReading
from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS, InferRequest, SequenceTag
from gateway.models.model import Model
from gateway.models.sharing import most_of_all
from gateway.observability.stream_tap import Tap
from gateway.rollouts.blocks import RequestBlocks
from gateway.rollouts.observation import Arm
from gateway.rollouts.plan import ALL, KeyPlace
from gateway.rollouts.shadow import Shadow

DIGEST_BYTES = 8
WHOLE = float(1 << 8 * DIGEST_BYTES)


def digest_of(salt: bytes, key: bytes) -> bytes:
    """The digest of a key, which stands for it."""
    return blake2b(salt + key, digest_size=DIGEST_BYTES).digest()


def fraction(digest: bytes) -> float:
    """The place of a key from 0 to 1; the candidate gets it at every weight above."""
    return int.from_bytes(digest, "big") / WHOLE


class Turns(Protocol):
    """The open conversations of versions."""

    def has(self, model: Model, tag: SequenceTag) -> bool:
        """Whether a version has the conversation of a tag."""


class VersionChoice:
    """Implements `VersionChooser` for two versions of a model.

    A request that continues a sequence or a conversation goes to the version that has it. A key
    keeps its version as long as the weight does not fall; keys are not kept. `weight` is in
    percent; the choice of a router is kept while there is any. Stable answers for a candidate that
    is not able or full, which counts as an error of the candidate. A request that wakes its version
    is no evidence: its time is that of a load. The `draining` versions of earlier rollouts keep
    their sequences and are no evidence either.
    """

    def __init__(
        self,
        stable: Model,
        candidate: Model,
        conversations: Turns,
        sources: Sequence[KeyPlace] = (),
        salt: bytes = b"",
        draining: Collection[Model] = (),
    ) -> None:
        self.stable = stable
        self.candidate = candidate
        self.weight = 0.0
        self._arms = {stable: Arm.STABLE, candidate: Arm.CANDIDATE}
        self._evidence: RequestBlocks | None = None
        self._shadow: Shadow | None = None
        self._conversations = conversations
        self.sources = sources
        self.has_keys = any(kind != "parameter" for kind, _ in sources)
        self._salt = salt
        self._draining = draining

    def choose(self, request: InferRequest) -> tuple[Model, Tap | None]:
        """The version for a request, and its tap."""
        tag = request.sequence
        key = self._key(request) if self.sources or tag is not None else b""
        if request.chosen:
            is_for_candidate = self.weight > 0 and request.version == self.candidate.version
        else:
            place = fraction(key) if key else random.random()
            is_for_candidate = place < self.weight / ALL
        model = self.candidate if is_for_candidate else self.stable
        if tag is not None and not tag.start and (held := self._holder(request, model)) is not None:
            model = held
        elif is_for_candidate:
            model = model if _has_room(model) else self._diverted(key)
        elif not _is_able(model) and _is_able(self.candidate):
            model = self.candidate  # stable has died
        arm = self._arms.get(model)
        if self._evidence is None or arm is None or model.instances.asleep:
            return model, None
        if self._shadow is not None and self._shadow.share and model is self.stable:
            return model, self._shadow.tap(request, key)
        return model, self._evidence.tap(arm, key)

    def pins(self, model: Model) -> bool:
        """Whether a version stays in memory; the candidate gives its room to stable."""
        return model is self.stable or not self.stable.instances.asleep

    def refused(self, request: InferRequest, model: Model, error: InferenceError) -> None:
        """Note that the chosen version has refused a request."""
        arm = self._arms.get(model)
        if arm is not None:
            self._refuse(error, arm, self._key(request))

    @property
    def key_texts(self) -> tuple[str, ...]:
        """The parts of a request that may be its key, as a plan has them."""
        return tuple(f"{kind}:{name}" for kind, name in self.sources)

    def observe(self, evidence: RequestBlocks | None, shadow: Shadow | None = None) -> None:
        """Observe requests from now on, and copy some; None ends both."""
        if self._shadow is not None:
            self._shadow.close()
        self._evidence, self._shadow = evidence, shadow

    def set_shares(self, weight: float, shadow: float) -> None:
        """Set the percentages of requests that the candidate answers, and gets as copies."""
        self.weight = weight
        if self._shadow is not None:
            self._shadow.share = shadow / ALL

    def families(self) -> list[MetricReading]:
        """The metrics of the copies, if there are some."""
        return [] if self._shadow is None else self._shadow.families()

    def keyed(
        self,
        request: InferRequest,
        header: Callable[[str], str | None],
        members: Mapping[str, Any] = NO_PARAMETERS,
    ) -> InferRequest:
        """The request with the headers, and members of OpenAI's, that may be its key."""
        places = {"header": header, "openai": members.get}
        found = {
            f"{kind}:{name}": text
            for kind, name in self.sources
            if kind in places and isinstance(text := places[kind](name), str)
        }
        return replace(request, sticky=found) if found else request

    def _holder(self, request: InferRequest, wanted: Model) -> Model | None:
        """The version that has the sequence or the conversation of a request."""
        other = self.stable if wanted is self.candidate else self.candidate
        for model in (wanted, other, *self._draining):
            if not model.retired and self._continues(model, request):
                return model
        return None

    def _diverted(self, key: bytes) -> Model:
        """Stable in place of the candidate, unless it is not able either."""
        if not _is_able(self.stable):
            return self.candidate
        error = InferenceError(Code.UNAVAILABLE, "the candidate is not able, or full")
        self._refuse(error, Arm.CANDIDATE, key)
        return self.stable

    def _refuse(self, error: InferenceError, arm: Arm, key: bytes) -> None:
        if self._evidence is not None:
            self._evidence.refuse(error, arm, key, time.perf_counter_ns())

    def _continues(self, model: Model, request: InferRequest) -> bool:
        sequences = model.scheduler.sequences
        if sequences is not None and sequences.continues(request):
            return True
        return request.sequence is not None and self._conversations.has(model, request.sequence)

    def _key(self, request: InferRequest) -> bytes:
        """The digest of a request's key, empty without one."""
        for kind, name in self.sources:
            places = request.parameters, name
            if kind != "parameter":
                places = request.sticky or {}, f"{kind}:{name}"
            found = places[0].get(places[1])
            if found not in (None, ""):
                return digest_of(self._salt, str(found).encode("utf-8", "surrogateescape"))
        if request.sequence is None:
            return b""
        return digest_of(self._salt, repr(request.sequence.key).encode())


def _has_room(model: Model) -> bool:
    if model.instances.asleep and model.waking is not None:
        try:
            model.waking.check()
        except InferenceError:
            return False  # there is no memory for it
    if not _is_able(model):
        return False
    count, most = len(model.requests), model.most_in_flight
    return count < most or count < most_of_all(model.fair, most)


def _is_able(model: Model) -> bool:
    return model.instances.ready and model.takes_requests
