"""The graph of an ensemble: its steps, their members, and the tensors between them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from gateway.config import ModelConfig
from gateway.config.scheduling import EnsembleScheduling
from gateway.messages import InferRequest
from gateway.stream import ResponseStream

LATEST = -1
"""`model_version` of a step that calls the highest version."""


class Member(Protocol):
    """One loaded version of a model that an ensemble calls; the methods are synchronous."""

    config: ModelConfig

    @property
    def labels(self) -> Mapping[str, tuple[str, ...]]:
        """The labels of each output that has some."""

    def call(self, request: InferRequest) -> ResponseStream:
        """Submit the request of a step; the caller owns the stream. Raises InferenceError."""

    def hold(self) -> None:
        """Keep the version loaded until `release`, even if it is replaced."""

    def release(self) -> None:
        """End one `hold`."""


Members = Mapping[tuple[str, int], Member]
"""The members of one ensemble, by the name and version in its steps."""


def labels_of_members(config: ModelConfig, members: Members) -> dict[str, tuple[str, ...]]:
    """The labels of an ensemble's outputs that its members define."""
    if config.ensemble_scheduling is None:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    outputs = {each.name for each in config.output}
    for step in config.ensemble_scheduling.step:
        labels = members[step.model_name, step.model_version].labels
        for output, tensor in step.output_map.items():
            if tensor in outputs and output in labels:
                found[tensor] = labels[output]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step of the config; pairs are a tensor's names in the member and in the ensemble."""

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
        """The ensemble's tensors that it reads."""
        return frozenset(tensor for _, tensor in self.inputs)

    @property
    def writes(self) -> frozenset[str]:
        """The ensemble's tensors that it writes."""
        return frozenset(tensor for _, tensor in self.outputs)


@dataclass(frozen=True)
class EnsembleGraph:
    """The steps of an ensemble, in the order of its config."""

    steps: tuple[Step, ...]

    @classmethod
    def of(cls, scheduling: EnsembleScheduling) -> "EnsembleGraph":
        """The graph of a config, which may be invalid."""
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
        """The step that writes a tensor; inputs of the ensemble have none."""
        return {tensor: step for step in self.steps for tensor in step.writes}

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """All tensors that steps read or write, in the order of the steps."""
        names = [name for step in self.steps for _, name in (*step.inputs, *step.outputs)]
        return tuple(dict.fromkeys(names))

    def ancestry(self, tensor: str) -> list[Step]:
        """The steps that a tensor depends on; the step that writes it is the first."""
        found: dict[Step, None] = {}
        wanted = [tensor]
        while wanted:
            step = self.writers.get(wanted.pop())
            if step is not None and step not in found:
                found[step] = None
                wanted += step.reads
        return list(found)

    def plan(self, outputs: Collection[str]) -> "StepPlan":
        """The steps that these outputs depend on."""
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
    """The steps for one choice of outputs: `readers` are the steps by the tensors that they read.

    `reads` is the number of tensors that a step reads; `wanted` is the set of `outputs`.
    """

    outputs: tuple[str, ...]
    wanted: frozenset[str]
    readers: Mapping[str, tuple[Step, ...]]
    reads: Mapping[Step, int]
