"""Which steps are due once which tensors are there?"""

import random
from functools import partial

import pytest

from gateway.ensembles.graph import Step
from gateway.ensembles.steps import Pass, StepGate, Value
from tests.gateway.ensembles.test_graph import DIAMOND, graph

THERE = Value(None, 0, None)


def add(within: Pass[None], *names: str) -> list[str]:
    """The models that are due with these tensors."""
    return [step.model for step in within.add((name, THERE) for name in names)]


def test_a_step_is_due_once_all_that_it_reads_is_there() -> None:
    within: Pass[None] = Pass(DIAMOND.plan(("Y", "Z")))
    assert add(within, "X") == ["a"]
    assert add(within, "m") == ["b", "c"]
    assert add(within, "r") == ["e"]
    assert add(within, "l") == ["d"]
    assert not within.complete
    assert add(within, "Z") == []
    assert not within.complete
    assert add(within, "Y") == []
    assert within.complete


def test_tensors_that_come_together_make_a_step_due_once() -> None:
    within: Pass[None] = Pass(DIAMOND.plan(("Y", "Z")))
    assert add(within, "l", "r") == ["d", "e"]


def test_steps_that_nobody_asked_for_are_never_due() -> None:
    within: Pass[None] = Pass(DIAMOND.plan(("Z",)))
    assert add(within, "m") == ["c"]
    assert add(within, "l") == []
    assert add(within, "r") == ["e"]


def test_an_output_that_is_an_input_is_there_at_once() -> None:
    within: Pass[None] = Pass(graph(("a", "X", "Y")).plan(("X",)))
    assert add(within, "X") == []
    assert within.complete


def test_every_step_of_a_random_graph_runs_once_and_after_what_it_reads() -> None:
    chance = random.Random(7)
    for _ in range(200):
        steps = [("s0", "A", "B")]
        for number in range(1, chance.randint(1, 12)):
            known = "ABCDEFGHIJKLMN"[: number + 1]
            reads = "".join(chance.sample(known, chance.randint(1, len(known))))
            steps.append((f"s{number}", reads, "ABCDEFGHIJKLMN"[number + 1]))
        made = graph(*steps)
        outputs = tuple(sorted({name for step in made.steps for name in step.writes}))
        within: Pass[None] = Pass(made.plan(outputs))
        ran: list[Step] = []
        due = within.add([("A", THERE)])
        while due:
            step = due.pop(chance.randrange(len(due)))
            assert step.reads <= within.values.keys()
            ran.append(step)
            due += within.add((name, THERE) for name in step.writes)
        assert sorted(step.index for step in ran) == list(range(len(steps)))
        assert within.complete


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
