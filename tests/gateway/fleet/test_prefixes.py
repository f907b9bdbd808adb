"""The list of a replica, and the index of a router against plain sets."""

from collections.abc import Sequence
from random import Random, SystemRandom

import pytest

from gateway.fleet.keys import KEY_BYTES
from gateway.fleet.prefixes import EXPECTED_SECS, AnnouncedKeys, HeldPrefixes, KeyChanges, KeyIndex


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(map(key, numbers))


@pytest.mark.parametrize("bad", [b"1234567", b"123456789", "12345678", 7])
def test_a_malformed_key_is_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="expected 8 bytes"):
        KeyChanges(gained=[bad])
    with pytest.raises(ValueError, match="expected 8 bytes"):
        KeyChanges(lost=[bad])


def test_changes_that_cancel_each_other_are_not_announced() -> None:
    held = AnnouncedKeys()
    for number in (1, 2):
        held.add(key(number))
    assert held.take_changes() == KeyChanges(gained=keys(1, 2))
    assert not held.take_changes()
    held.discard(key(1))
    held.add(key(1))
    held.add(key(3))
    held.discard(key(3))
    held.discard(key(2))
    assert held.take_changes() == KeyChanges(lost=keys(2))
    held.clear()
    held.add(key(4))
    assert held.take_changes() == KeyChanges(gained=keys(4), reset=True)


def test_the_longest_unused_keys_are_evicted_from_the_end_of_their_chain() -> None:
    held = HeldPrefixes(5)
    held.use(keys(1, 2, 3))
    held.use(keys(11, 12))
    held.use(
        keys(
            21,
        )
    )
    assert held.matched(keys(1, 2, 3)) == 2
    held.use(keys(1, 2))
    held.use(
        keys(
            31,
        )
    )
    assert held.matched(keys(11, 12)) == 1
    assert held.matched(keys(1, 2, 3)) == 2
    assert len(held) == 5


def test_the_count_of_the_engine_removes_wrong_keys_and_lowers_the_capacity() -> None:
    held = HeldPrefixes(20)
    chain = keys(*range(10))
    held.use(chain)
    held.correct(chain, expected=10, cached_tokens=520, prompt_tokens=1300)
    assert held.matched(chain) == 4
    assert held.capacity == 14


def test_a_cache_that_holds_more_raises_the_capacity_faster() -> None:
    held = HeldPrefixes(20)
    held.correct(keys(*range(10)), expected=2, cached_tokens=1000, prompt_tokens=1000)
    assert held.capacity == 36


def test_an_error_of_one_key_is_rounding() -> None:
    held = HeldPrefixes(20)
    chain = keys(*range(10))
    held.use(chain)
    held.correct(chain, expected=10, cached_tokens=900, prompt_tokens=1000)
    assert held.matched(chain) == 10
    assert held.capacity == 20


def test_a_capacity_stays_near_the_size_of_the_cache() -> None:
    held = HeldPrefixes(8)
    chain = keys(*range(40))
    for _ in range(20):
        held.correct(chain, expected=0, cached_tokens=1, prompt_tokens=1)
    assert held.capacity == 32
    for _ in range(20):
        held.correct(chain, expected=40, cached_tokens=0, prompt_tokens=1)
    assert held.capacity == 2


def announced(**by_replica: Sequence[int]) -> KeyIndex:
    index = KeyIndex()
    for replica_id, numbers in by_replica.items():
        index.announce(replica_id, KeyChanges(gained=keys(*numbers)))
    return index


def test_the_leading_keys_on_each_replica_are_counted() -> None:
    index = announced(a=(1, 2, 3), b=(1, 2), c=(1, 3), d=(2, 3))
    assert index.held(keys(1, 2, 3, 4), now=0.0) == {"a": 3, "b": 2, "c": 1}
    assert index.held(keys(1, 2), now=0.0) == {"a": 2, "b": 2, "c": 1}
    assert index.held(keys(9), now=0.0) == {}
    assert index.held((), now=0.0) == {}


def test_keys_of_a_chosen_replica_count_for_two_seconds() -> None:
    index = announced(a=(1,))
    index.expect("a", keys(1, 2), now=10.0)
    index.expect("b", keys(1, 2), now=11.0)
    assert index.held(keys(1, 2), now=11.9) == {"a": 2, "b": 2}
    assert index.held(keys(1, 2), now=12.0) == {"a": 1, "b": 2}
    assert index.held(keys(1, 2), now=13.0) == {"a": 1}
    assert index.holders(key(2)) == []


def test_a_key_that_is_chosen_again_counts_from_then_on() -> None:
    index = announced()
    index.expect("a", keys(1), now=10.0)
    index.expect("a", keys(1), now=11.0)
    assert index.held(keys(1), now=12.5) == {"a": 1}
    assert index.held(keys(1), now=11.0 + EXPECTED_SECS) == {}


def test_an_expected_key_that_is_announced_stays() -> None:
    index = announced()
    index.expect("a", keys(1), now=10.0)
    index.announce("a", KeyChanges(gained=keys(1)))
    assert index.held(keys(1), now=20.0) == {"a": 1}


def test_a_new_replica_has_nothing_of_a_lost_one() -> None:
    index = announced(a=(1, 2), b=(1,))
    index.expect("a", keys(5), now=10.0)
    index.remove("a")
    index.announce("c", KeyChanges(gained=keys(9)))
    assert index.held(keys(1, 2), now=10.0) == {"b": 1}
    assert index.held(keys(5), now=10.0) == {}
    assert index.held(keys(9), now=10.0) == {"c": 1}
    index.remove("never seen")


def test_a_pin_that_two_routers_began_at_once_has_two_holders() -> None:
    index = announced(a=(1,), b=(1,))
    assert index.holders(key(1)) == ["a", "b"]


def test_a_foreign_key_is_refused_without_an_effect() -> None:
    index = announced(a=(1, 2), b=(3,))
    with pytest.raises(ValueError, match="replica 'a' lost keys that it had not announced"):
        index.announce("a", KeyChanges(gained=keys(4), lost=keys(1, 3)))
    with pytest.raises(ValueError, match="replica 'new' lost"):
        index.announce("new", KeyChanges(lost=keys(3)))
    assert [index.holders(key(each)) for each in (1, 3, 4)] == [["a"], ["b"], []]


def test_a_replica_with_too_many_keys_is_refused_without_an_effect() -> None:
    index = KeyIndex(most_of_replica=3)
    index.announce("a", KeyChanges(gained=keys(1, 2)))
    with pytest.raises(ValueError, match="replica 'a' announces 4 keys, expected at most 3"):
        index.announce("a", KeyChanges(gained=keys(3, 4)))
    index.announce("a", KeyChanges(gained=keys(3, 4), lost=keys(1)))
    assert index.held(keys(2, 3, 4), now=0.0) == {"a": 3}


def test_a_full_index_leaves_out_further_keys_and_their_loss() -> None:
    index = KeyIndex(most_keys=2)
    index.announce("a", KeyChanges(gained=keys(1, 2, 3, 4)))
    index.announce("b", KeyChanges(gained=keys(1, 5)))
    assert (len(index), index.left_out) == (2, 3)
    assert index.holders(key(1)) == ["a", "b"]
    index.announce("a", KeyChanges(lost=[*keys(3, 3), key(1)]))
    assert index.left_out == 2
    with pytest.raises(ValueError, match="lost keys that it had not announced"):
        index.announce("a", KeyChanges(lost=keys(3, 4)))
    index.announce("a", KeyChanges(gained=keys(2), reset=True))
    assert index.left_out == 1


REPLICAS = "abcdefghij"
NUMBERS = 24
STEPS = 400


@pytest.mark.parametrize("run", range(8))
def test_after_any_changes_the_index_is_the_union_of_the_lists(run: int) -> None:
    seed = SystemRandom().randrange(10**9)
    random, index = Random(seed), KeyIndex()
    lists: dict[str, AnnouncedKeys] = {}
    for step in range(STEPS):
        _change(random, lists, index)
        truth = {name: set(held) for name, held in lists.items()}
        for number in range(NUMBERS):
            holders = {name for name, held in truth.items() if key(number) in held}
            assert set(index.holders(key(number))) == holders, f"seed {seed}, step {step}"
        chain = keys(*random.sample(range(NUMBERS), 6))
        found = {name: _leading(held, chain) for name, held in truth.items()}
        expected = {name: count for name, count in found.items() if count}
        assert index.held(chain, now=0.0) == expected, f"seed {seed}, step {step}"
        assert len(index) == len(set().union(*truth.values())), f"seed {seed}, step {step}"


def _change(random: Random, lists: dict[str, AnnouncedKeys], index: KeyIndex) -> None:
    """One replica gains and loses keys, empties its list, ends, or is known anew."""
    name = random.choice(REPLICAS)
    held = lists.setdefault(name, AnnouncedKeys())
    kind = random.random()
    if kind < 0.1:
        index.remove(name)
        del lists[name]
        return
    if kind < 0.2:
        held.clear()
    for number in random.sample(range(NUMBERS), 5):
        if random.random() < 0.6:
            held.add(key(number))
        else:
            held.discard(key(number))
    index.announce(name, held.take_changes())
    if kind > 0.9:
        index.announce(name, held.everything())


def _leading(held: set[bytes], chain: Sequence[bytes]) -> int:
    return next((count for count, each in enumerate(chain) if each not in held), len(chain))
