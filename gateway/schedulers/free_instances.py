"""Instances of one model that can take an execution, and the leases of those that execute."""

from collections import Counter, deque
from collections.abc import Callable, Iterator

from gateway.backend import Instance
from gateway.schedulers.rate_limiter import ExecutionLimiter, Registration


class FreeInstances:
    """The instances that can take one more execution, in the order in which they became free.

    `on_free` is called when an instance may have become free. An instance that is registered with
    a rate limiter also needs its turn; `on_free` is called in its turn, which ends with that call.
    """

    def __init__(self, on_free: Callable[[], None]) -> None:
        self._on_free = on_free
        self._free: deque[Instance] = deque()
        self._known: set[Instance] = set()
        self._limiter: ExecutionLimiter | None = None
        self._registrations: dict[Instance, Registration] = {}
        self._executing: Counter[Instance] = Counter()
        self._offered: Instance | None = None

    def __bool__(self) -> bool:
        return bool(self._free)

    @property
    def limited(self) -> bool:
        """Whether a rate limiter gives turns."""
        return self._limiter is not None

    def knows(self, instance: Instance) -> bool:
        """Whether it may execute: it was added, not removed since, and is alive."""
        return instance in self._known and instance.alive

    @property
    def first(self) -> Instance:
        """The instance to be taken next, unless the rate limiter offers another; not if empty."""
        return self._offered or self._free[0]

    def add(self, instance: Instance, registration: Registration | None = None) -> None:
        """Add an instance, free for all executions that it takes at once."""
        self._known.add(instance)
        if registration is not None:
            self._limiter = registration.limiter
            self._registrations[instance] = registration
        self._free.extend([instance] * (instance.concurrency or 1))

    def remove(self, instance: Instance) -> None:
        """Remove an instance; its leases stay valid."""
        self._known.discard(instance)
        self._free = deque(free for free in self._free if free is not instance)
        if self._offered is instance:
            self._offered = None
        self._forget_registration(instance)
        if not self._known:
            self.rest()

    def take(self) -> "Lease | None":
        """A lease of the next instance; None if no instance is free, or it is not its turn."""
        if self._limiter is not None:
            return self._take_turn(self._limiter)
        while self._free:
            instance = self._free.popleft()
            if not instance.alive:  # it is about to be removed
                continue
            if instance.concurrency is None:
                self._free.append(instance)
            return Lease(self, instance)
        return None

    def release(self, lease: "Lease") -> None:
        """End a lease; no effect if it has ended."""
        if lease.ended:
            return
        lease.ended = True
        instance = lease.instance
        if instance.concurrency is not None and instance in self._known and instance.alive:
            self._free.append(instance)
        if self._limiter is not None:
            self._executing[instance] -= 1
            self._limiter.ended(self._registrations[instance])
            self._forget_registration(instance)
        self._on_free()

    def rest(self) -> None:
        """Withdraw from the rate limiter: nothing is queued for these instances."""
        if self._limiter is not None:
            self._limiter.rest(self)

    def _take_turn(self, limiter: ExecutionLimiter) -> "Lease | None":
        instance, self._offered = self._offered, None
        if instance is None:
            limiter.ask(self)
            return None
        self._free.remove(instance)
        if instance.concurrency is None:
            self._free.append(instance)
        self._executing[instance] += 1
        limiter.began(self._registrations[instance])
        return Lease(self, instance)

    def _forget_registration(self, instance: Instance) -> None:
        if instance not in self._known and not self._executing[instance]:
            self._registrations.pop(instance, None)
            del self._executing[instance]

    # Called by the rate limiter.

    def candidates(self) -> Iterator[tuple[Instance, Registration]]:
        """Each free instance that is alive, with its registration."""
        free = dict.fromkeys(self._free)
        return ((each, self._registrations[each]) for each in free if each.alive)

    def offer(self, instance: Instance) -> None:
        """Give an instance its turn."""
        self._offered = instance
        try:
            self._on_free()
        finally:
            self._offered = None


class Lease:
    """An instance that was taken for one execution; ends with the execution at the latest."""

    __slots__ = ("_free", "ended", "instance")

    def __init__(self, free: FreeInstances, instance: Instance) -> None:
        self.instance = instance
        self.ended = False
        self._free = free

    def release(self) -> None:
        """Return the instance; no effect if it has been returned."""
        self._free.release(self)
