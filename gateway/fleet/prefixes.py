"""The keys that a replica holds, and the index of all replicas in a router."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gateway.fleet.keys import KEY_BYTES

MOST_KEYS_OF_REPLICA = 1 << 18
MOST_KEYS = 1 << 22
"""Keys of one index, which then takes about a GiB."""
EXPECTED_SECS = 2.0
"""The time for which a key of a chosen replica counts before the replica announces it."""
CAPACITY_RANGE = 4
"""A capacity is at most this factor above and below the size of the engine's cache."""


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """The keys that a replica gained and lost since its last announcement.

    With `reset` it holds the gained ones only.
    """

    gained: Sequence[bytes] = ()
    lost: Sequence[bytes] = ()
    reset: bool = False

    def __bool__(self) -> bool:
        return bool(self.gained or self.lost or self.reset)

    def __post_init__(self) -> None:
        for key in (*self.gained, *self.lost):
            if type(key) is not bytes or len(key) != KEY_BYTES:
                raise ValueError(f"a key of a replica is {key!r:.60}, expected {KEY_BYTES} bytes")


class AnnouncedKeys:
    """The keys that a replica holds, and their changes since it last announced them.

    These are its pins, and the base of its prefixes.
    """

    def __init__(self) -> None:
        self._gained: dict[bytes, None] = {}
        self._lost: dict[bytes, None] = {}
        self._reset = False
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._held)

    def add(self, key: bytes) -> None:
        """Hold a key; the latest is at the end."""
        if key in self._held:
            self._held.move_to_end(key)
            return
        self._held[key] = None
        if key in self._lost:
            del self._lost[key]
        else:
            self._gained[key] = None

    def discard(self, key: bytes) -> None:
        """Hold a key no longer."""
        if key not in self._held:
            return
        del self._held[key]
        if key in self._gained:
            del self._gained[key]
        else:
            self._lost[key] = None

    def clear(self) -> None:
        """Hold nothing: the state of the model is gone."""
        self._held.clear()
        self._gained.clear()
        self._lost.clear()
        self._reset = True

    def take_changes(self) -> KeyChanges:
        """The changes since the last call, for the routers that know the earlier ones."""
        changes = KeyChanges(tuple(self._gained), tuple(self._lost), self._reset)
        self._gained.clear()
        self._lost.clear()
        self._reset = False
        return changes

    def everything(self) -> KeyChanges:
        """All that is announced, for a router that knows nothing; call after `take_changes`."""
        return KeyChanges(tuple(self._held), reset=True)


class HeldPrefixes(AnnouncedKeys):
    """The prefixes that an engine's cache is expected to hold, the latest used last.

    `capacity` is a number of keys: the cache's tokens over the tokens of a key. The engine's own
    counts of cached tokens correct it.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = self._size = max(1, capacity)

    def matched(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys that are held."""
        return next((n for n, key in enumerate(keys) if key not in self), len(keys))

    def use(self, keys: Sequence[bytes]) -> None:
        """A request with these keys is computed; the longest unused keys are evicted.

        The first key is the latest used, so that a chain is evicted from its end.
        """
        for key in reversed(keys):
            self.add(key)
        self._evict()

    def correct(
        self, keys: Sequence[bytes], *, expected: int, cached_tokens: int, prompt_tokens: int
    ) -> None:
        """Compare the leading keys that were expected in the cache with the engine's count.

        Call it before `use`. Wrong keys are discarded, and the capacity changes by the error; one
        key is rounding. A list that is too small costs more than one too large: it grows faster.
        """
        found = min(len(keys), round(len(keys) * cached_tokens / max(1, prompt_tokens)))
        error = found - expected
        if abs(error) <= 1:
            return
        for key in keys[found:expected]:
            self.discard(key)
        capacity = self.capacity + (2 * error if error > 0 else error)
        least, most = self._size // CAPACITY_RANGE, self._size * CAPACITY_RANGE
        self.capacity = max(1, least, min(most, capacity))
        self._evict()

    def _evict(self) -> None:
        while len(self) > self.capacity:
            self.discard(next(iter(self)))


class KeyIndex:
    """The replicas that hold each key, merged from their announcements; one index per kind of key.

    The holders of a key are the bits of an integer: a chain of 256 keys is matched against 1,000
    replicas with as many ANDs. The time is an argument.
    """

    def __init__(
        self, *, most_keys: int = MOST_KEYS, most_of_replica: int = MOST_KEYS_OF_REPLICA
    ) -> None:
        self._most_keys = most_keys
        self._most_of_replica = most_of_replica
        self._holders: dict[bytes, int] = {}
        self._numbers: dict[str, int] = {}
        self._ids: list[str] = []
        self._free: list[int] = []
        self._keys: dict[str, set[bytes]] = {}
        self._left_out: dict[str, int] = {}
        self._expected: dict[bytes, int] = {}
        self._until: dict[int, dict[bytes, float]] = {}
        self._expiries: deque[tuple[float, int, Sequence[bytes]]] = deque()

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def left_out(self) -> int:
        """The number of announced keys beyond the capacity of the index."""
        return sum(self._left_out.values())

    def announce(self, replica_id: str, changes: KeyChanges) -> None:
        """Apply the changes of a replica. ValueError, without an effect: foreign or too many keys.

        A key that the replica loses without having announced it is foreign.
        """
        held = set() if changes.reset else self._keys.get(replica_id, set())
        left_out = 0 if changes.reset else self._left_out.get(replica_id, 0)
        lost = set(changes.lost)
        if len(lost - held) > left_out:
            raise ValueError(f"replica '{replica_id}' lost keys that it had not announced")
        size = len(held) + left_out + len(changes.gained) - len(lost)
        if size > self._most_of_replica:
            raise ValueError(
                f"replica '{replica_id}' announces {size} keys, "
                f"expected at most {self._most_of_replica}"
            )
        if changes.reset:
            self._forget(replica_id)
        bit = 1 << self._number(replica_id)
        self._lose(replica_id, lost, bit)
        self._gain(replica_id, changes.gained, bit)

    def remove(self, replica_id: str) -> None:
        """A replica is gone, with all its keys and what was expected of it."""
        self._forget(replica_id)
        number = self._numbers.pop(replica_id, None)
        if number is None:
            return
        del self._keys[replica_id], self._left_out[replica_id]
        for _, holder, keys in self._expiries:
            for key in keys if holder == number else ():
                if key in self._until[number]:
                    self._unexpect(number, key)
        self._ids[number] = ""
        heapq.heappush(self._free, number)

    def expect(self, replica_id: str, keys: Sequence[bytes], now: float) -> None:
        """Count the keys of a chosen replica for two seconds, until it announces them."""
        self._expire(now)
        number, until = self._number(replica_id), now + EXPECTED_SECS
        bit = 1 << number
        new = [key for key in keys if not self._holders.get(key, 0) & bit]
        for key in new:
            self._expected[key] = self._expected.get(key, 0) | bit
        if new:
            self._until.setdefault(number, {}).update(dict.fromkeys(new, until))
            self._expiries.append((until, number, new))

    def held(self, keys: Sequence[bytes], now: float) -> Mapping[str, int]:
        """The number of leading keys on each replica that has the first."""
        self._expire(now)
        found: dict[str, int] = {}
        alive = (1 << len(self._ids)) - 1
        for depth, key in enumerate(keys):
            still = alive & (self._holders.get(key, 0) | self._expected.get(key, 0))
            if still != alive and depth:
                found.update(dict.fromkeys(self._names(alive ^ still), depth))
            if not still:
                return found
            alive = still
        if keys:
            found.update(dict.fromkeys(self._names(alive), len(keys)))
        return found

    def holders(self, key: bytes) -> list[str]:
        """The replicas that announced a key: of a pin one, unless two routers began it at once."""
        return self._names(self._holders.get(key, 0))

    def _names(self, holders: int) -> list[str]:
        names = []  # of each depth few: a look at each replica is 7 ms for a chain of 256 keys
        while holders:
            lowest = holders & -holders
            names.append(self._ids[lowest.bit_length() - 1])
            holders ^= lowest
        return names

    def _number(self, replica_id: str) -> int:
        number = self._numbers.get(replica_id)
        if number is None:
            number = heapq.heappop(self._free) if self._free else len(self._ids)
            self._ids[number : number + 1] = [replica_id]
            self._numbers[replica_id] = number
            self._keys[replica_id] = set()
            self._left_out[replica_id] = 0
        return number

    def _gain(self, replica_id: str, gained: Iterable[bytes], bit: int) -> None:
        held = self._keys[replica_id]
        for key in gained:
            if key in self._holders or len(self._holders) < self._most_keys:
                self._holders[key] = self._holders.get(key, 0) | bit
                held.add(key)
            else:
                self._left_out[replica_id] += 1

    def _lose(self, replica_id: str, lost: Iterable[bytes], bit: int) -> None:
        held = self._keys[replica_id]
        for key in lost:
            if key not in held:
                self._left_out[replica_id] -= 1
                continue
            held.discard(key)
            self._clear(self._holders, key, bit)

    def _forget(self, replica_id: str) -> None:
        held = self._keys.get(replica_id)
        if held is not None:
            bit = 1 << self._numbers[replica_id]
            for key in held:
                self._clear(self._holders, key, bit)
            held.clear()
            self._left_out[replica_id] = 0

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            until, number, keys = self._expiries.popleft()
            for key in keys:
                if self._until[number].get(key) == until:
                    self._unexpect(number, key)

    def _unexpect(self, number: int, key: bytes) -> None:
        del self._until[number][key]
        self._clear(self._expected, key, 1 << number)

    def _clear(self, table: dict[bytes, int], key: bytes, bit: int) -> None:
        holders = table[key] & ~bit
        if holders:
            table[key] = holders
        else:
            del table[key]
