"""Checks of an ensemble's config and of its members, with Triton's order and texts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from gateway.batches.shapes import agree
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.scheduling import EnsembleScheduling
from gateway.ensembles.graph import EnsembleGraph, Step
from gateway.errors import Code, InferenceError
from gateway.tensor import format_shape

MemberConfigs = Mapping[tuple[str, int], ModelConfig]
"""The configs of the members, by the name and version in the steps."""
NOT_DECOUPLED = 0


def flow_problems(config: ModelConfig) -> Iterator[str]:
    """The problems of an ensemble's own config, in Triton's order."""
    name = config.name
    if config.instance_group:
        yield f"instance group should not be specified for ensemble '{name}'"
    if config.optimization is not None:
        yield f"optimization should not be specified for ensemble '{name}'"
    if config.model_warmup:
        yield f"model_warmup can not be specified for ensemble '{name}'"
    scheduling = config.ensemble_scheduling
    if scheduling is None:
        return
    if not scheduling.step:
        yield f"must specify 'step' for ensemble '{name}'"
    yield from _step_problems(name, scheduling)
    yield from _tensor_problems(config, EnsembleGraph.of(scheduling))


def _step_problems(name: str, scheduling: EnsembleScheduling) -> Iterator[str]:
    written: set[str] = set()
    for number, step in enumerate(scheduling.step):
        for key in ("model_name", "input_map", "output_map"):
            if not getattr(step, key):
                yield f"must specify '{key}' in step {number} of ensemble '{name}'"
        for tensor in step.output_map.values():
            if tensor in written:
                yield (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for "
                    f"ensemble '{name}' step {number}"
                )
            written.add(tensor)


def _tensor_problems(config: ModelConfig, graph: EnsembleGraph) -> Iterator[str]:
    name, inputs = config.name, [each.name for each in config.input]
    outputs = [each.name for each in config.output]
    for tensor in inputs:
        if tensor not in graph.tensors:
            yield f"ensemble input '{tensor}' for ensemble {name}' is not used"
        if tensor in graph.writers:
            yield (
                f"ensemble tensor '{tensor}' is an input of ensemble '{name}' and must not appear "
                f"in an output map, but does in that of step {graph.writers[tensor].index}"
            )
    ready = _reached(graph, inputs)
    for tensor in outputs:
        if tensor not in graph.tensors:
            yield f"ensemble output '{tensor}' for ensemble {name}' is not used"
        if tensor not in ready:
            why = _why(graph, tensor, ready)
            yield f"output '{tensor}' for ensemble '{name}' is not written{why}"
    read = {tensor for step in graph.steps for tensor in step.reads}
    for tensor in graph.tensors:
        if tensor not in outputs and (tensor not in ready or tensor not in read):
            yield f"ensemble tensor '{tensor}' is unused in ensemble '{name}'"


def _reached(graph: EnsembleGraph, inputs: list[str]) -> set[str]:
    """All tensors that steps can write from these."""
    ready, before = set(inputs), -1
    while len(ready) > before:
        before = len(ready)
        for step in graph.steps:
            if step.reads <= ready:
                ready |= step.writes
    return ready


def _why(graph: EnsembleGraph, tensor: str, ready: set[str]) -> str:
    """The most distant tensor that blocks this one."""
    seen = [tensor]
    while (step := graph.writers.get(seen[-1])) is not None:
        unready = [name for _, name in step.inputs if name not in ready and name not in seen]
        if not unready:
            break
        seen.append(unready[0])
    if len(seen) == 1:
        return ""
    return f": at least one of its depending tensors, '{seen[-1]}', is not connected"


@dataclass(frozen=True, slots=True)
class _Inferred:
    """The properties of an ensemble's tensor, and the model that they come from."""

    model: str
    datatype: DataType
    dims: tuple[int, ...]
    batching: bool

    @property
    def full_dims(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batching else self.dims

    @classmethod
    def outside(cls, tensor: ModelInput | ModelOutput, config: ModelConfig) -> "_Inferred":
        dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
        return cls(config.name, tensor.data_type, dims, config.batching)

    @classmethod
    def inside(cls, tensor: ModelInput | ModelOutput, model: str, batching: bool) -> "_Inferred":
        return cls(model, tensor.data_type, tensor.dims, batching)


def check_wiring(config: ModelConfig, members: MemberConfigs) -> bool:
    """Check the members' completed configs; return whether the ensemble is decoupled.

    It is decoupled if any member is. Raises INVALID_ARG for the first problem.
    """
    assert config.ensemble_scheduling is not None  # noqa: S101 - it is an ensemble
    graph = EnsembleGraph.of(config.ensemble_scheduling)
    tensors = {each.name: _Inferred.outside(each, config) for each in config.input}
    tensors |= {each.name: _Inferred.outside(each, config) for each in config.output}
    for step in graph.steps:
        _check_step(config, step, members[step.member], tensors)
    labels = _labels(config, graph, members, tensors)
    return any(label != NOT_DECOUPLED for label in labels.values())


def _check_step(
    config: ModelConfig, step: Step, member: ModelConfig, tensors: dict[str, _Inferred]
) -> None:
    _raise_first(_batch_problems(config, step, member))
    _raise_first(_input_problems(config, step, member))
    inputs = {each.name: each for each in member.input}
    for name, tensor in step.inputs:
        _agree(config, tensor, _Inferred.inside(inputs[name], step.model, member.batching), tensors)
    _raise_first(_output_problems(config, step, member))
    outputs = {each.name: each for each in member.output}
    for name, tensor in step.outputs:
        found = _Inferred.inside(outputs[name], step.model, member.batching)
        _agree(config, tensor, found, tensors)


def _batch_problems(config: ModelConfig, step: Step, member: ModelConfig) -> Iterator[str]:
    if 0 < member.max_batch_size < config.max_batch_size:
        yield (
            f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it "
            f"contains model {step.model} which only allows maximum batch size to be "
            f"{member.max_batch_size}"
        )


def _input_problems(config: ModelConfig, step: Step, member: ModelConfig) -> Iterator[str]:
    known = {each.name for each in member.input}
    for name, tensor in step.inputs:
        if name not in known:
            yield (
                f"in ensemble {config.name}, ensemble tensor {tensor} is mapping to non-existing "
                f"input {name} in model {step.model}"
            )
    mapped = {name for name, _ in step.inputs}
    for each in member.input:
        if each.name not in mapped and not each.optional:
            yield (
                f"in ensemble {config.name}, input {each.name} in model {step.model} is not mapped "
                "to any ensemble tensors"
            )


def _output_problems(config: ModelConfig, step: Step, member: ModelConfig) -> Iterator[str]:
    known = {each.name for each in member.output}
    for name, tensor in step.outputs:
        if name not in known:
            yield (
                f"in ensemble {config.name}, ensemble tensor {tensor} is mapped from non-existing "
                f"output {name} in model {step.model}"
            )


def _agree(
    config: ModelConfig, tensor: str, found: _Inferred, tensors: dict[str, _Inferred]
) -> None:
    """Record the properties of a tensor; raise if another model has different ones."""
    known = tensors.setdefault(tensor, found)
    what = ""
    if known.datatype is not found.datatype:
        what, one, other = "data type", str(known.datatype), str(found.datatype)
    elif not (agree(known.dims, found.dims) or agree(known.full_dims, found.full_dims)):
        what = "shape"
        one, other = format_shape(known.full_dims), format_shape(found.full_dims)
    if what:
        _refuse(
            config,
            f"ensemble tensor {tensor}: inconsistent {what}: {one} is inferred from model "
            f"{known.model} while {other} is inferred from model {found.model}",
        )


def _labels(
    config: ModelConfig,
    graph: EnsembleGraph,
    members: MemberConfigs,
    tensors: Mapping[str, _Inferred],
) -> Mapping[str, int]:
    """For each tensor the decoupled step that it depends on."""
    labels = dict.fromkeys((each.name for each in config.input), NOT_DECOUPLED)
    left, decoupled = list(graph.steps), NOT_DECOUPLED
    while left:
        step = next(step for step in left if step.reads <= labels.keys())
        left.remove(step)
        first = step.outputs[0][1]
        label = _common_label(config, tensors[first].model, [labels[t] for _, t in step.inputs])
        if members[step.member].decoupled:
            decoupled += 1
            label = decoupled
        labels |= dict.fromkeys(step.writes, label)
    _common_label(config, config.name, [labels[each.name] for each in config.output])
    return labels


def _common_label(config: ModelConfig, model: str, labels: list[int]) -> int:
    if len(set(labels)) > 1:
        _refuse(
            config,
            f"step of model '{model}' receives inputs originated from different decoupled models",
        )
    return labels[0] if labels else NOT_DECOUPLED


def _raise_first(problems: Iterator[str]) -> None:
    if problem := next(problems, ""):
        raise InferenceError(Code.INVALID_ARG, problem)


def _refuse(config: ModelConfig, problem: str) -> NoReturn:
    raise InferenceError(Code.INVALID_ARG, f"in ensemble {config.name}, {problem}")
