"""Which steps does an ensemble have, which tensors flow between them, and which are needed?"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from gateway.config import ModelConfig
from gateway.config.scheduling import EnsembleScheduling
from gateway.messages import InferRequest
from gateway.stream import ResponseStream

LATEST = -1
"""The version that a step asks for if it is content with the highest."""


class Member(Protocol):
    """One loaded version of a model that an ensemble calls. The methods are plain."""

    config: ModelConfig

    def call(self, request: InferRequest) -> ResponseStream:
        """Take the request of a step; whoever gets the stream cancels it. Raises InferenceError."""

    def hold(self) -> None:
        """Keep the version loaded, even if it has been replaced, until one more `release`."""

    def release(self) -> None:
        """Let go."""


Members = Mapping[tuple[str, int], Member]
"""The members of one ensemble, by the name and the version that its steps ask for."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of a member; the pairs are names: the member's tensor, and the ensemble's."""

    index: int
    member: tuple[str, int]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def model(self) -> str:
        """The name of the member."""
        return self.member[0]

    @property
    def reads(self) -> frozenset[str]:
        """The tensors of the ensemble that it needs."""
        return frozenset(tensor for _, tensor in self.inputs)

    @property
    def writes(self) -> frozenset[str]:
        """The tensors of the ensemble that it makes."""
        return frozenset(tensor for _, tensor in self.outputs)


@dataclass(frozen=True)
class EnsembleGraph:
    """The steps of an ensemble, in the order of its config."""

    steps: tuple[Step, ...]

    @classmethod
    def of(cls, scheduling: EnsembleScheduling) -> "EnsembleGraph":
        """The graph that a config describes, whether it makes sense or not."""
        return cls(
            tuple(
                Step(
                    index=index,
                    member=(step.model_name, step.model_version),
                    inputs=tuple(step.input_map.items()),
                    outputs=tuple(step.output_map.items()),
                )
                for index, step in enumerate(scheduling.step)
            )
        )

    @cached_property
    def writers(self) -> Mapping[str, Step]:
        """The step that makes a tensor; an input of the ensemble has none."""
        return {tensor: step for step in self.steps for tensor in step.writes}

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor that a step reads or makes, in the order of the steps."""
        names = [name for step in self.steps for _, name in (*step.inputs, *step.outputs)]
        return tuple(dict.fromkeys(names))

    def ancestry(self, tensor: str) -> list[Step]:
        """The steps that a tensor comes from, the one that makes it first."""
        found: dict[Step, None] = {}
        wanted = [tensor]
        while wanted:
            step = self.writers.get(wanted.pop())
            if step is not None and step not in found:
                found[step] = None
                wanted += step.reads
        return list(found)

    def plan(self, outputs: Collection[str]) -> "StepPlan":
        """What to run for these outputs: no step that none of them comes from."""
        needed = {step for output in outputs for step in self.ancestry(output)}
        steps = [step for step in self.steps if step in needed]
        readers: dict[str, list[Step]] = {}
        for step in steps:
            for tensor in step.reads:
                readers.setdefault(tensor, []).append(step)
        return StepPlan(
            outputs=tuple(outputs),
            wanted=frozenset(outputs),
            readers={tensor: tuple(found) for tensor, found in readers.items()},
            reads={step: len(step.reads) for step in steps},
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How one choice of outputs is made; `readers` are the steps to run, by what they read.

    `reads` is how many tensors each of them needs; `wanted` has the outputs, for looking up.
    """

    outputs: tuple[str, ...]
    wanted: frozenset[str]
    readers: Mapping[str, tuple[Step, ...]]
    reads: Mapping[Step, int]
