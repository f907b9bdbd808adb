"""Keys of prompts and pins."""

import time
from random import Random

import pytest

from gateway.fleet.keys import (
    MOST_KEYS_OF_PROMPT,
    PIECE_BYTES,
    PrefixScope,
    PromptKeys,
    rendezvous,
)

SECRET = bytes(range(32))
SCOPE = PrefixScope(model="m", version="1")
KEYS = PromptKeys(SECRET)
LONG = "A sentence that is repeated until the prompt is long enough. " * 100


def test_a_key_has_eight_bytes_and_stands_for_1024_of_the_prompt() -> None:
    found = KEYS.of_text(SCOPE, LONG)
    assert len(found) == len(LONG) // 1024
    assert {len(each) for each in found} == {8}
    assert KEYS.of_text(SCOPE, "a" * (PIECE_BYTES - 1)) == ()
    assert len(KEYS.of_text(SCOPE, "a" * PIECE_BYTES)) == 1


def test_keys_of_a_prompt_begin_those_of_its_continuation() -> None:
    first = KEYS.of_text(SCOPE, LONG)
    assert KEYS.of_text(SCOPE, LONG + LONG)[: len(first)] == first


def test_a_change_changes_all_keys_after_it() -> None:
    changed = LONG[:2000] + "X" + LONG[2001:]
    pairs = zip(KEYS.of_text(SCOPE, LONG), KEYS.of_text(SCOPE, changed), strict=True)
    assert [ours == other for ours, other in pairs] == [True] + [False] * (
        len(LONG) // PIECE_BYTES - 1
    )


@pytest.mark.parametrize(
    "scope",
    [
        PrefixScope(model="n", version="1"),
        PrefixScope(model="m", version="2"),
        PrefixScope(model="m1", version=""),
        PrefixScope(model="m", version="1", adapter="a"),
        PrefixScope(model="m", version="1", cache_salt="a"),
        PrefixScope(model="m", version="1", tenant="a"),
    ],
)
def test_another_scope_shares_no_key(scope: PrefixScope) -> None:
    assert not set(KEYS.of_text(scope, LONG)) & set(KEYS.of_text(SCOPE, LONG))


def test_another_fleet_shares_no_key() -> None:
    other = PromptKeys(bytes(32))
    assert not set(other.of_text(SCOPE, LONG)) & set(KEYS.of_text(SCOPE, LONG))
    with pytest.raises(ValueError, match="has 31 bytes, expected 32 or more"):
        PromptKeys(bytes(31))


def test_a_chat_continues_message_by_message_after_its_tools() -> None:
    first = [LONG.encode(), b'{"role":"user"}']
    chat = KEYS.of_messages(SCOPE, b"[]", first)
    longer = KEYS.of_messages(SCOPE, b"[]", [*first, LONG.encode()])
    assert len(chat) == len(LONG) // PIECE_BYTES
    assert longer[: len(chat)] == chat
    assert not set(KEYS.of_messages(SCOPE, b"[1]", first)) & set(chat)


def test_a_text_and_a_message_and_tokens_share_no_key() -> None:
    text = KEYS.of_text(SCOPE, "\0" + "a" * (PIECE_BYTES - 1))
    chat = KEYS.of_messages(SCOPE, b"", [b"a" * (PIECE_BYTES - 1)])
    ids = KEYS.of_tokens(SCOPE, [0x61616100, *[0x61616161] * (PIECE_BYTES // 4 - 1)])
    assert len({*text, *chat, *ids}) == 3


def test_token_ids_have_a_key_for_256_of_them() -> None:
    ids = list(range(600))
    found = KEYS.of_tokens(SCOPE, ids)
    assert len(found) == 2
    assert KEYS.of_tokens(SCOPE, [*ids[:511], 7])[0] == found[0]
    assert KEYS.of_tokens(SCOPE, [*ids[:511], 7])[1] != found[1]
    with pytest.raises(ValueError, match="no 32-bit integer"):
        KEYS.of_tokens(SCOPE, [2**31])


def test_keys_of_a_huge_prompt_end_at_a_limit() -> None:
    assert len(KEYS.of_text(SCOPE, "a" * (2 << 20))) == MOST_KEYS_OF_PROMPT


def test_pins_differ_by_kind_and_model_and_name() -> None:
    names = [("sequence", "m", "1"), ("conversation", "m", "1"), ("sequence", "m1", "")]
    assert len({KEYS.of_pin(*each) for each in names}) == 3


def test_pins_spread_over_replicas_and_only_those_of_a_lost_one_move() -> None:
    ids = [f"replica-{number}" for number in range(8)]
    pins = [KEYS.of_pin("sequence", "m", str(number)) for number in range(800)]
    before = {pin: rendezvous(pin, ids) for pin in pins}
    places = [first for first, _ in before.values()]
    assert all(60 <= places.count(each) <= 140 for each in ids)
    for pin, (first, second) in before.items():
        after = rendezvous(pin, reversed([each for each in ids if each != "replica-3"]))
        assert after[0] == (second if first == "replica-3" else first)
    assert rendezvous(pins[0], ["a"]) == ["a"]
    assert rendezvous(pins[0], []) == []


def test_32_768_token_ids_have_keys_in_a_millisecond() -> None:
    ids = Random(1).choices(range(150_000), k=1 << 15)

    def secs() -> float:
        began = time.thread_time()
        assert len(KEYS.of_tokens(SCOPE, ids)) == 128
        return time.thread_time() - began

    assert any(secs() < 0.001 for _ in range(1000))  # others share the caches of the processor
