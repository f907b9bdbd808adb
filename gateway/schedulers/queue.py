"""Queues of requests: admission, priorities, timeouts and limits.

Triton's queue policies (`ModelQueuePolicy`, `priority_levels`): level 1 executes first, a level is
first in first out, and requests delayed by a timeout follow the rest of their level. The time is
an argument.
"""

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from gateway.batches.padding import MAX_LENGTH, Padding
from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching, QueuePolicy, TimeoutAction
from gateway.errors import Code, InferenceError, RetryLater
from gateway.messages import InferRequest, request_prefix
from gateway.schedulers.execution import Entry
from gateway.tensor import Tensor

NS_PER_US = 1000
KEPT_LEVELS = 16
"""Number of levels kept; clients may name any level, and further ones are deleted when empty."""
SPARE_DEADLINES = 64
"""Number of stale deadlines that are kept, if they are less than half of all."""
LENGTH_DIMENSION = 1
"""The dimension of a padded input that is its length: the first after the batch."""


def queue_full(request: InferRequest) -> RetryLater:
    """The refusal of a request beyond the limit of its level, with Triton's text."""
    return RetryLater(f"{request_prefix(request.id)}Exceeds maximum queue size")


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue, with the properties that decide about its batch.

    `rows` is its batch size, at least 1; `level` its priority; `deadline_ns` the end of its
    timeout, 0 without one. Requests with different `key` never share a batch. `length` is that of
    its padded inputs. `queued` and `deadline` are set by the queue.
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
    """The end of a request's timeout; `waiting` is None once the request has left the queue."""

    at_ns: int
    number: int
    waiting: QueuedRequest | None = field(compare=False)


class QueueRules:
    """Priorities, timeouts and limits of `dynamic_batching`."""

    def __init__(self, batching: DynamicBatching) -> None:
        self.levels = batching.priority_levels
        """The number of levels; 0 if there is one, for every priority."""
        self._in_order = batching.preserve_ordering
        self._default_level = batching.default_priority_level
        self._default = batching.default_queue_policy or QueuePolicy()
        self._policies = batching.priority_queue_policy if self.levels else {}
        self.limited = any(
            policy.max_queue_size for policy in (self._default, *self._policies.values())
        )
        """Whether any level has a limit."""
        self.plain = not self.levels and not self._default.default_timeout_microseconds
        """Whether there is one level, without a timeout."""

    def level(self, priority: int) -> int:
        """The level of a request with that priority: the default for 0 and for unknown levels."""
        if not self.levels:
            return 0
        return priority if 0 < priority <= self.levels else self._default_level

    def limit(self, level: int) -> int:
        """The most requests of a level; 0 for any number."""
        return self._policy(level).max_queue_size

    def rejects(self, level: int) -> bool:
        """Whether a timeout rejects the request; otherwise it is delayed."""
        return self._policy(level).timeout_action is TimeoutAction.REJECT

    def deadline_ns(self, level: int, timeout_us: int, now_ns: int) -> int:
        """The end of the timeout of a request that arrives now; 0 without one.

        A request can only shorten the model's default, and only if the policy allows it. With
        `preserve_ordering` no request is delayed, since later responses would wait for it.
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
    """One priority: requests in order of arrival, then those delayed by a timeout."""

    live: OrderedDict[QueuedRequest, None] = field(default_factory=OrderedDict)
    delayed: OrderedDict[QueuedRequest, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.live) + len(self.delayed)


class RequestQueue:
    """The queued requests of one model; any request can be removed immediately.

    `rows` are those of all requests: 0 if it is empty. `deadlines` is a heap, empty if no request
    has a timeout; it may contain requests that have left the queue.
    """

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []
        self.deadlines: list[QueueDeadline] = []
        self._count = 0
        self._pushed = 0
        self.rows = 0

    def __len__(self) -> int:
        return self._count

    @property
    def only(self) -> QueuedRequest | None:
        """The only request; None if there is none, or if there are several."""
        return next(iter(self)) if self._count == 1 else None

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All requests in the order of execution; the queue must not change meanwhile."""
        parts: list[OrderedDict[QueuedRequest, None]] = []
        for number in self._order:
            level = self._levels[number]
            parts += (level.live, level.delayed)
        return chain.from_iterable(parts)

    @property
    def nearest_deadline_ns(self) -> int:
        """The next time at which a timeout ends; 0 if there is none."""
        deadlines = self.deadlines
        while deadlines and deadlines[0].waiting is None:
            heapq.heappop(deadlines)
        return deadlines[0].at_ns if deadlines else 0

    def full(self, level: int) -> bool:
        """Whether a level has reached its limit."""
        if not self._rules.limited:
            return False
        limit = self._rules.limit(level)
        return 0 < limit <= self.size(level)

    def size(self, level: int) -> int:
        """The requests of a level."""
        return len(self._levels[level]) if level in self._levels else 0

    def of(self, level: int) -> Iterable[QueuedRequest]:
        """The requests of a level in the order of execution."""
        found = self._levels.get(level)
        return () if found is None else chain(found.live, found.delayed)

    def push(self, waiting: QueuedRequest) -> None:
        """Append a request to its level."""
        level = self._levels.get(waiting.level)
        if level is None:
            level = self._new_level(waiting.level)
        level.live[waiting] = None
        waiting.queued = True
        self._count += 1
        self.rows += waiting.rows
        if waiting.deadline_ns:
            self._set_deadline(waiting)

    def put_back(self, waiting: QueuedRequest) -> None:
        """Insert a request that no instance received, at its place in its level."""
        self.push(waiting)
        level = self._levels[waiting.level]
        level.live = OrderedDict.fromkeys(sorted(level.live, key=lambda each: each.arrived_ns))

    def remove(self, batch: Iterable[QueuedRequest]) -> list[Entry]:
        """Remove requests, and return their entries; those that are not queued are ignored."""
        entries: list[Entry] = []
        for waiting in batch:
            if not waiting.queued:
                continue
            entries.append(waiting.entry)
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
        return entries

    def expire(self, now_ns: int) -> list[QueuedRequest]:
        """Remove and return requests rejected by their timeout; delay the other expired ones."""
        rejected: list[QueuedRequest] = []
        while self.deadlines and self.deadlines[0].at_ns <= now_ns:
            waiting = heapq.heappop(self.deadlines).waiting
            if waiting is None:
                continue
            if self._rules.rejects(waiting.level):
                self.remove((waiting,))
                rejected.append(waiting)
            else:
                level = self._levels[waiting.level]
                del level.live[waiting]
                level.delayed[waiting] = None
        return rejected

    def _new_level(self, number: int) -> _Level:
        level = self._levels[number] = _Level()
        insort(self._order, number)
        return level

    def _set_deadline(self, waiting: QueuedRequest) -> None:
        self._pushed += 1
        waiting.deadline = QueueDeadline(waiting.deadline_ns, self._pushed, waiting)
        heapq.heappush(self.deadlines, waiting.deadline)
        if len(self.deadlines) > SPARE_DEADLINES + 2 * self._count:
            self.deadlines = [each for each in self.deadlines if each.waiting is not None]
            heapq.heapify(self.deadlines)


class QueueAdmission:
    """Checks requests and prepares them for the queue; one per model."""

    def __init__(self, config: ModelConfig, rules: QueueRules, padding: Padding) -> None:
        self._rules = rules
        self.padded = frozenset(padding.inputs)
        """The names of the inputs that are padded."""
        self._max_length = padding.max_length
        compatibility = Compatibility(config, padding)
        self._key = compatibility.key
        self.uniform = compatibility.uniform
        """Whether any two requests may share a batch."""

    def check(self, request: InferRequest) -> None:
        """Raise INVALID_ARG unless all padded inputs have one length that the model accepts."""
        found = {
            each.name: each.shape[LENGTH_DIMENSION]
            for each in request.inputs
            if each.name in self.padded
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
        """The queued form of a request that arrives now, or arrived before in a fair queue."""
        request, now_ns = entry.request, entry.arrived_ns or now_ns
        level = deadline_ns = 0
        if not self._rules.plain:
            level = self._rules.level(request.priority)
            deadline_ns = self._rules.deadline_ns(level, request.timeout_us, now_ns)
        return QueuedRequest(
            entry,
            rows=entry.record.batch_size or 1,
            arrived_ns=now_ns,
            level=level,
            deadline_ns=deadline_ns,
            key=None if self.uniform else self._key(request),
            length=self._length(request) if self.padded else 1,
        )

    def _length(self, request: InferRequest) -> int:
        for tensor in request.inputs:
            if tensor.name in self.padded:
                return max(1, tensor.shape[LENGTH_DIMENSION])
        return 1


class Compatibility:
    """Keys of requests; only requests with equal keys may share a batch.

    Inputs of variable size must have equal shapes after the batch, unless they are ragged; the
    lengths of padded inputs may differ. Shape tensors must be equal. If the model has optional
    inputs, the same inputs must be present.
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
