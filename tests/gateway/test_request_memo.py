"""A memo of requests is bounded, and evicts its oldest entry."""

from gateway.request_memo import MOST_KNOWN, RequestMemo


def full() -> RequestMemo[int, str]:
    memo: RequestMemo[int, str] = RequestMemo()
    for number in range(MOST_KNOWN):
        memo[number] = "old"
    return memo


def test_a_new_key_of_a_full_memo_evicts_the_oldest() -> None:
    memo = full()
    memo[MOST_KNOWN] = "new"
    assert list(memo) == list(range(1, MOST_KNOWN + 1))


def test_a_known_key_replaces_its_entry_and_evicts_none() -> None:
    memo = full()
    memo[3] = "new"
    assert len(memo) == MOST_KNOWN
    assert (memo.get(0), memo.get(3), memo.get(MOST_KNOWN)) == ("old", "new", None)
