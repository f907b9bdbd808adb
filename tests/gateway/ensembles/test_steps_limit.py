"""How many calls of one step may there be at once?"""

from functools import partial

import pytest

from gateway.ensembles.steps import StepGate


def test_whoever_comes_to_a_full_gate_is_let_in_when_somebody_leaves_in_order() -> None:
    gate, let_in = StepGate(2), list[str]()
    admits = {name: partial(let_in.append, name) for name in "abcde"}
    assert [gate.enter(admits[name]) for name in "abcde"] == [True, True, False, False, False]
    gate.withdraw(admits["c"])
    gate.leave()
    assert let_in == ["d"]
    gate.leave()
    assert let_in == ["d", "e"]
    gate.leave()
    gate.leave()
    assert [gate.enter(admits[name]) for name in "abc"] == [True, True, False]


def test_withdrawing_what_does_not_wait_does_nothing() -> None:
    gate = StepGate(1)
    assert gate.enter(lambda: pytest.fail("it is in already"))
    gate.withdraw(lambda: None)
    gate.leave()
    assert gate.enter(lambda: None)
