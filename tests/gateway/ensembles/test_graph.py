"""Steps to run for the outputs that a request asks for."""

from gateway.config.scheduling import EnsembleScheduling, EnsembleStep
from gateway.ensembles.graph import EnsembleGraph, StepPlan


def graph(*steps: tuple[str, str, str]) -> EnsembleGraph:
    """A step for each model with the tensors that it reads and those that it makes."""
    return EnsembleGraph.of(
        EnsembleScheduling(
            step=tuple(
                EnsembleStep(
                    model_name=model,
                    model_version=-1,
                    input_map={f"i{number}": name for number, name in enumerate(reads)},
                    output_map={f"o{number}": name for number, name in enumerate(writes)},
                )
                for model, reads, writes in steps
            )
        )
    )


def models(plan: StepPlan) -> list[str]:
    """The models that a plan calls."""
    return [step.model for step in plan.reads]


DIAMOND = graph(
    ("a", "X", "m"), ("b", "m", "l"), ("c", "m", "r"), ("d", "lr", "Y"), ("e", "r", "Z")
)


def test_a_graph_has_the_tensors_that_each_step_reads_and_writes() -> None:
    step = DIAMOND.steps[3]
    assert (step.model, step.reads, step.writes) == ("d", {"l", "r"}, {"Y"})
    assert DIAMOND.tensors == ("X", "m", "l", "r", "Y", "Z")
    assert {tensor: step.model for tensor, step in DIAMOND.writers.items()} == {
        "m": "a",
        "l": "b",
        "r": "c",
        "Y": "d",
        "Z": "e",
    }


def test_a_plan_for_all_outputs_has_every_step() -> None:
    plan = DIAMOND.plan(("Y", "Z"))
    assert models(plan) == ["a", "b", "c", "d", "e"]
    assert [step.model for step in plan.readers["m"]] == ["b", "c"]


def test_steps_of_other_outputs_are_omitted() -> None:
    assert models(DIAMOND.plan(("Y",))) == ["a", "b", "c", "d"]
    plan = DIAMOND.plan(("Z",))
    assert models(plan) == ["a", "c", "e"]
    assert [step.model for step in plan.readers["m"]] == ["c"]
    assert "l" not in plan.readers


def test_a_tensor_that_feeds_one_step_twice_counts_once() -> None:
    plan = graph(("a", "XX", "Y")).plan(("Y",))
    assert list(plan.reads.values()) == [1]
