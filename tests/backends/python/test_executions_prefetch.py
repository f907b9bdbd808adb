"""Short executions are handed over before the worker asks for them; others are not."""

from backends.python.execution import AT_ONCE, SHORT_NS, Prefetch


def after(*infer_ns: int, allowed: bool = True) -> Prefetch:
    overlap = Prefetch(allowed=allowed)
    for each in infer_ns:
        overlap.measured(each)
    return overlap


def test_nothing_overlaps_before_the_first_execution_was_measured() -> None:
    assert not after().room(0)


def test_short_executions_overlap_up_to_a_limit() -> None:
    overlap = after(SHORT_NS // 2)
    assert overlap.room(AT_ONCE - 1)
    assert not overlap.room(AT_ONCE)


def test_long_executions_do_not() -> None:
    assert not after(SHORT_NS).room(0)


def test_one_that_was_long_ends_it_until_many_have_been_short() -> None:
    overlap = after(1000, 4 * SHORT_NS)
    assert not overlap.room(0)
    for _ in range(10):
        overlap.measured(1000)
    assert overlap.room(0)


def test_models_whose_executions_must_not_be_formed_early_have_no_prefetch() -> None:
    assert not after(1000, allowed=False).room(0)
