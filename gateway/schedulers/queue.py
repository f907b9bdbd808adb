"""Who waits, in which order, and for how long? Priorities, timeouts and limits; times passed in.

Triton's queue policies (`ModelQueuePolicy`, `priority_levels`): level 1 goes first, a level is
first in first out, and those that a timeout has delayed come after the rest of their level.
"""

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from gateway.batches.padding import MAX_LENGTH, Padding
from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching, QueuePolicy, TimeoutAction
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, request_prefix
from gateway.schedulers.execution import Entry
from gateway.tensor import Tensor

NS_PER_US = 1000
KEPT_LEVELS = 16
"""A client may name any level: those beyond so many are forgotten once they are empty."""
SPARE_DEADLINES = 64
"""Deadlines of requests that have gone are swept out once there are more, and more than half."""
LENGTH_DIMENSION = 1
"""Of a padded input: the first after the batch."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue, and all that decides when it is executed and with whom.

    `rows` is its batch size, at least 1; `level` its priority; `deadline_ns` when its timeout
    ends, 0 if never. Requests of different `key` never share a batch. `length` is that of its
    padded inputs. `queued` and `deadline` are kept by the queue.
    """

    entry: Entry
    rows: int
    arrived_ns: int
    level: int = 0
    deadline_ns: int = 0
    key: Hashable = None
    length: int = 1
    queued: bool = False
    deadline: "QueueDeadline | None" = None


@dataclass(slots=True, order=True)
class QueueDeadline:
    """When a request has waited too long; forgets it once it has left."""

    at_ns: int
    number: int
    waiting: QueuedRequest | None = field(compare=False)


class QueueRules:
    """What `dynamic_batching` says of priorities, timeouts and limits."""

    def __init__(self, batching: DynamicBatching) -> None:
        self._levels = batching.priority_levels
        self._in_order = batching.preserve_ordering
        self._default_level = batching.default_priority_level
        self._default = batching.default_queue_policy or QueuePolicy()
        self._policies = batching.priority_queue_policy if self._levels else {}

    def level(self, priority: int) -> int:
        """The level of a request of that priority: the default for 0 and for unknown levels."""
        if not self._levels:
            return 0
        return priority if 0 < priority <= self._levels else self._default_level

    def limit(self, level: int) -> int:
        """How many requests may wait in a level; 0 for any number."""
        return self._policy(level).max_queue_size

    def rejects(self, level: int) -> bool:
        """Whether a request that waited too long is rejected; otherwise it is delayed."""
        return self._policy(level).timeout_action is TimeoutAction.REJECT

    def deadline_ns(self, level: int, timeout_us: int, now_ns: int) -> int:
        """When a request that comes now, with this `timeout`, has waited too long; 0 if never.

        A request can only shorten the model's default, and only if the policy allows it. Nobody
        is delayed where responses keep their order: those that passed would wait for them.
        """
        policy = self._policy(level)
        if self._in_order and policy.timeout_action is TimeoutAction.DELAY:
            return 0
        allowed_us = policy.default_timeout_microseconds
        if policy.allow_timeout_override and 0 < timeout_us < allowed_us:
            allowed_us = timeout_us
        return now_ns + allowed_us * NS_PER_US if allowed_us else 0

    def _policy(self, level: int) -> QueuePolicy:
        return self._policies.get(level, self._default)


@dataclass(slots=True)
class _Level:
    """One priority: requests in the order they came, then those that were delayed."""

    live: OrderedDict[QueuedRequest, None] = field(default_factory=OrderedDict)
    delayed: OrderedDict[QueuedRequest, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.live) + len(self.delayed)


class RequestQueue:
    """The requests of one model that wait; a request leaves it from any place, at once."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self._deadlines: list[QueueDeadline] = []
        self._count = 0
        self._pushed = 0
        self.rows = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Everybody, in the order in which they are to be executed."""
        for number in self._order:
            level = self._levels[number]
            yield from level.live
            yield from level.delayed

    @property
    def nearest_deadline_ns(self) -> int:
        """When the queue is to be asked for what has expired; 0 if nothing will."""
        deadlines = self._deadlines
        while deadlines and deadlines[0].waiting is None:
            heapq.heappop(deadlines)
        return deadlines[0].at_ns if deadlines else 0

    def full(self, level: int) -> bool:
        """Whether a level has as many requests as it may have."""
        limit = self._rules.limit(level)
        return limit > 0 and level in self._levels and len(self._levels[level]) >= limit

    def push(self, waiting: QueuedRequest) -> None:
        """Take a request; it comes last in its level."""
        self._level(waiting.level).live[waiting] = None
        waiting.queued = True
        self._count += 1
        self.rows += waiting.rows
        if waiting.deadline_ns:
            self._set_deadline(waiting)

    def put_back(self, waiting: QueuedRequest) -> None:
        """Take a request again that no instance has taken, at its place in its level."""
        self.push(waiting)
        level = self._levels[waiting.level]
        level.live = OrderedDict.fromkeys(sorted(level.live, key=lambda each: each.arrived_ns))

    def remove(self, batch: Iterable[QueuedRequest]) -> None:
        """Let requests go; those that have left already are no error."""
        for waiting in batch:
            if waiting.queued:
                self._remove(waiting)

    def expire(self, now_ns: int) -> list[QueuedRequest]:
        """Remove and return those whose timeout has ended; delay those that are not rejected."""
        rejected: list[QueuedRequest] = []
        while self._deadlines and self._deadlines[0].at_ns <= now_ns:
            waiting = heapq.heappop(self._deadlines).waiting
            if waiting is None:
                continue
            if self._rules.rejects(waiting.level):
                self._remove(waiting)
                rejected.append(waiting)
            else:
                level = self._levels[waiting.level]
                del level.live[waiting]
                level.delayed[waiting] = None
        return rejected

    def _level(self, number: int) -> _Level:
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level()
            insort(self._order, number)
        return level

    def _remove(self, waiting: QueuedRequest) -> None:
        level = self._levels[waiting.level]
        if waiting in level.live:
            del level.live[waiting]
        else:
            del level.delayed[waiting]
        waiting.queued = False
        if waiting.deadline is not None:
            waiting.deadline.waiting = None
        self._count -= 1
        self.rows -= waiting.rows
        if len(self._levels) > KEPT_LEVELS and not len(level):
            del self._levels[waiting.level]
            self._order.remove(waiting.level)

    def _set_deadline(self, waiting: QueuedRequest) -> None:
        self._pushed += 1
        waiting.deadline = QueueDeadline(waiting.deadline_ns, self._pushed, waiting)
        heapq.heappush(self._deadlines, waiting.deadline)
        if len(self._deadlines) > SPARE_DEADLINES + 2 * self._count:
            self._deadlines = [each for each in self._deadlines if each.waiting is not None]
            heapq.heapify(self._deadlines)


class QueueAdmission:
    """Makes what waits in the queue out of a request; prepared once per model."""

    def __init__(self, config: ModelConfig, rules: QueueRules, padding: Padding) -> None:
        self._rules = rules
        self._padded = frozenset(padding.inputs)
        self._max_length = padding.max_length
        compatibility = Compatibility(config, padding)
        self._key = compatibility.key
        self.uniform = compatibility.uniform
        """Whether any two requests may share a batch."""

    def check(self, request: InferRequest) -> None:
        """Raise INVALID_ARG unless all padded inputs have one length, and one the model takes."""
        if not self._padded:
            return
        found = {
            each.name: each.shape[LENGTH_DIMENSION]
            for each in request.inputs
            if each.name in self._padded
        }
        if len(set(found.values())) > 1:
            lengths = ", ".join(f"'{name}' has {length}" for name, length in found.items())
            raise InferenceError(
                Code.INVALID_ARG,
                f"{request_prefix(request.id)}padded inputs of model '{request.model}' must have "
                f"the same length in dimension {LENGTH_DIMENSION}: {lengths}",
            )
        for name, length in found.items():
            self._check_length(request, name, length)

    def _check_length(self, request: InferRequest, name: str, length: int) -> None:
        if self._max_length is not None and not 1 <= length <= self._max_length:
            raise InferenceError(
                Code.INVALID_ARG,
                f"{request_prefix(request.id)}padded input '{name}' of model '{request.model}' has "
                f"length {length} in dimension {LENGTH_DIMENSION}, expected 1 to "
                f"{self._max_length}, its parameter '{MAX_LENGTH}'",
            )

    def waiting(self, entry: Entry, now_ns: int) -> QueuedRequest:
        """What the queue takes for a request that comes now."""
        request = entry.request
        level = self._rules.level(request.priority)
        return QueuedRequest(
            entry,
            rows=entry.record.batch_size or 1,
            arrived_ns=now_ns,
            level=level,
            deadline_ns=self._rules.deadline_ns(level, request.timeout_us, now_ns),
            key=None if self.uniform else self._key(request),
            length=self._length(request) if self._padded else 1,
        )

    def _length(self, request: InferRequest) -> int:
        for tensor in request.inputs:
            if tensor.name in self._padded:
                return max(1, tensor.shape[LENGTH_DIMENSION])
        return 1


class Compatibility:
    """Gives each request a key; only requests with equal keys may share a batch.

    Inputs of variable size must have items of one shape unless they are ragged; of a padded one
    the length may differ. Shape tensors must be equal. If the model has optional inputs, the same
    ones must be present.
    """

    def __init__(self, config: ModelConfig, padding: Padding) -> None:
        self._optional = any(each.optional for each in config.input)
        first = 1 if config.batching else 0
        self._variable = {
            each.name: first + (each.name in padding.inputs)
            for each in config.input
            if not each.allow_ragged_batch
            and -1 in each.dims[1 if each.name in padding.inputs else 0 :]
        }
        self._shapes = frozenset(each.name for each in config.input if each.is_shape_tensor)
        self._uniform = not (self._optional or self._variable or self._shapes)

    @property
    def uniform(self) -> bool:
        """Whether any two requests may share a batch."""
        return self._uniform

    def key(self, request: InferRequest) -> Hashable:
        """Equal for requests that may share a batch."""
        if self._uniform:
            return None
        return frozenset(part for tensor in request.inputs if (part := self._part(tensor)))

    def _part(self, tensor: Tensor) -> tuple[Hashable, ...]:
        name = tensor.name
        if name in self._shapes:
            return (name, tensor.shape, bytes(tensor.raw()))
        if name in self._variable:
            return (name, tensor.shape[self._variable[name] :])
        return (name,) if self._optional else ()
