"""Which of a model's instances can take an execution, and which may?"""

from collections import Counter, deque
from collections.abc import Callable, Iterator

from gateway.backend import Instance
from gateway.schedulers.rate_limiter import RateLimiter, Registration


class FreeInstances:
    """The instances that can take one more execution, in the order in which they became free.

    One that was added with a share needs its turn, too: where there is none yet, `on_turn` will
    be called, and the turn is lost unless it takes the instance.
    """

    def __init__(self, on_turn: Callable[[], None]) -> None:
        self._on_turn = on_turn
        self._free: deque[Instance] = deque()
        self._known: set[Instance] = set()
        self._limiter: RateLimiter | None = None
        self._shares: dict[Instance, Registration] = {}
        self._executing: Counter[Instance] = Counter()
        self._offered: Instance | None = None

    def __bool__(self) -> bool:
        return bool(self._free)

    @property
    def limited(self) -> bool:
        """Whether a rate limiter gives turns."""
        return self._limiter is not None

    def knows(self, instance: Instance) -> bool:
        """Whether it may execute: it was added, not forgotten since, and is alive."""
        return instance in self._known and instance.alive

    @property
    def first(self) -> Instance:
        """The one to be taken next, as far as is known; there must be one."""
        return self._offered or self._free[0]

    def add(self, instance: Instance, share: Registration | None = None) -> None:
        """An instance has come."""
        self._known.add(instance)
        if share is not None:
            self._limiter = share.limiter
            self._shares[instance] = share
        self._free.extend([instance] * (instance.concurrency or 1))

    def forget(self, instance: Instance) -> None:
        """It has gone, or is about to; what it executes is still to be `ended`."""
        self._known.discard(instance)
        self._free = deque(free for free in self._free if free is not instance)
        if self._offered is instance:
            self._offered = None
        self._forget_share(instance)
        if not self._known:
            self.rest()

    def take(self) -> Instance | None:
        """An instance that executes from now on; None if there is none, or not its turn."""
        if self._limiter is not None:
            return self._take_turn(self._limiter)
        while self._free:
            instance = self._free.popleft()
            if not instance.alive:  # it is about to be forgotten
                continue
            if instance.concurrency is None:
                self._free.append(instance)
            return instance
        return None

    def ended(self, instance: Instance) -> None:
        """An execution on a taken instance has ended, or did not come about."""
        if instance.concurrency is not None and instance in self._known and instance.alive:
            self._free.append(instance)
        if self._limiter is not None:
            self._executing[instance] -= 1
            self._limiter.ended(self._shares[instance])
            self._forget_share(instance)

    def rest(self) -> None:
        """Nobody wants an instance any more: let others have their turns."""
        if self._limiter is not None:
            self._limiter.rest(self)

    def _take_turn(self, limiter: RateLimiter) -> Instance | None:
        instance, self._offered = self._offered, None
        if instance is None:
            limiter.ask(self)
            return None
        self._free.remove(instance)
        if instance.concurrency is None:
            self._free.append(instance)
        self._executing[instance] += 1
        limiter.began(self._shares[instance])
        return instance

    def _forget_share(self, instance: Instance) -> None:
        if instance not in self._known and not self._executing[instance]:
            self._shares.pop(instance, None)
            del self._executing[instance]

    # For the rate limiter.

    def candidates(self) -> Iterator[tuple[Instance, Registration]]:
        """Each free instance that is alive, with its share."""
        free = dict.fromkeys(self._free)
        return ((each, self._shares[each]) for each in free if each.alive)

    def offer(self, instance: Instance) -> None:
        """Its turn has come."""
        self._offered = instance
        try:
            self._on_turn()
        finally:
            self._offered = None


class Hold:
    """That an instance has been taken for an execution; ends once, at the latest with it.

    `then` is called when it has ended: somebody else may want the instance.
    """

    __slots__ = ("_free", "_then", "ended", "instance")

    def __init__(self, free: FreeInstances, instance: Instance, then: Callable[[], None]) -> None:
        self.instance = instance
        self.ended = False
        self._free = free
        self._then = then

    def end(self) -> None:
        """Let go of the instance; no effect if that has been done."""
        if not self.ended:
            self.ended = True
            self._free.ended(self.instance)
            self._then()
