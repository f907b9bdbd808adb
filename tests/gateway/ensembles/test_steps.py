"""Steps that are due once their tensors are there."""

import random
from functools import partial

import pytest

from gateway.ensembles.graph import Step
from gateway.ensembles.steps import DataFlow, EnsembleTensor, StepLimit
from tests.gateway.ensembles.test_graph import DIAMOND, graph

THERE = EnsembleTensor(None, 0, None)


def add(flow: DataFlow, *names: str) -> list[str]:
    """The models that are due with these tensors."""
    return [step.model for step in flow.add((name, THERE) for name in names)]


def test_a_step_is_due_once_all_of_its_inputs_exist() -> None:
    flow = DataFlow(DIAMOND.plan(("Y", "Z")))
    assert add(flow, "X") == ["a"]
    assert add(flow, "m") == ["b", "c"]
    assert add(flow, "r") == ["e"]
    assert add(flow, "l") == ["d"]
    assert not flow.complete
    assert add(flow, "Z") == []
    assert not flow.complete
    assert add(flow, "Y") == []
    assert flow.complete


def test_tensors_added_together_make_a_step_due_once() -> None:
    flow = DataFlow(DIAMOND.plan(("Y", "Z")))
    assert add(flow, "l", "r") == ["d", "e"]


def test_steps_without_requested_outputs_are_never_due() -> None:
    flow = DataFlow(DIAMOND.plan(("Z",)))
    assert add(flow, "m") == ["c"]
    assert add(flow, "l") == []
    assert add(flow, "r") == ["e"]


def test_an_output_that_is_an_input_is_there_at_once() -> None:
    flow = DataFlow(graph(("a", "X", "Y")).plan(("X",)))
    assert add(flow, "X") == []
    assert flow.complete


def test_every_step_of_a_random_graph_runs_once_and_after_its_inputs() -> None:
    chance = random.Random(7)
    for _ in range(200):
        steps = [("s0", "A", "B")]
        for number in range(1, chance.randint(1, 12)):
            known = "ABCDEFGHIJKLMN"[: number + 1]
            reads = "".join(chance.sample(known, chance.randint(1, len(known))))
            steps.append((f"s{number}", reads, "ABCDEFGHIJKLMN"[number + 1]))
        made = graph(*steps)
        outputs = tuple(sorted({name for step in made.steps for name in step.writes}))
        flow = DataFlow(made.plan(outputs))
        ran: list[Step] = []
        due = flow.add([("A", THERE)])
        while due:
            step = due.pop(chance.randrange(len(due)))
            assert step.reads <= flow.values.keys()
            ran.append(step)
            due += flow.add((name, THERE) for name in step.writes)
        assert sorted(step.index for step in ran) == list(range(len(steps)))
        assert flow.complete


def test_calls_beyond_the_limit_start_in_order_when_others_end() -> None:
    limit, started = StepLimit(2), list[str]()
    starts = {name: partial(started.append, name) for name in "abcde"}
    assert [limit.acquire(starts[name]) for name in "abcde"] == [True, True, False, False, False]
    limit.cancel(starts["c"])
    limit.release()
    assert started == ["d"]
    limit.release()
    assert started == ["d", "e"]
    limit.release()
    limit.release()
    assert [limit.acquire(starts[name]) for name in "abc"] == [True, True, False]


def test_cancelling_a_call_that_is_not_queued_has_no_effect() -> None:
    limit = StepLimit(1)
    assert limit.acquire(lambda: pytest.fail("it has started"))
    limit.cancel(lambda: None)
    limit.release()
    assert limit.acquire(lambda: None)
