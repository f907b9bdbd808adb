"""Do an ensemble's steps lead from its inputs to its outputs? Triton's checks and texts."""

from collections.abc import Iterator

from gateway.config import ModelConfig
from gateway.config.scheduling import EnsembleScheduling
from gateway.ensembles.graph import Graph


def flow_problems(config: ModelConfig) -> Iterator[str]:
    """What is wrong with an ensemble that its own config shows, the first thing first."""
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
    yield from _tensor_problems(config, Graph.of(scheduling))


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


def _tensor_problems(config: ModelConfig, graph: Graph) -> Iterator[str]:
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


def _reached(graph: Graph, inputs: list[str]) -> set[str]:
    """The tensors that can be made from these."""
    ready, before = set(inputs), -1
    while len(ready) > before:
        before = len(ready)
        for step in graph.steps:
            if step.reads <= ready:
                ready |= step.writes
    return ready


def _why(graph: Graph, tensor: str, ready: set[str]) -> str:
    """The tensor farthest back that keeps this one from being made."""
    seen = [tensor]
    while (step := graph.writers.get(seen[-1])) is not None:
        unready = [name for _, name in step.inputs if name not in ready and name not in seen]
        if not unready:
            break
        seen.append(unready[0])
    if len(seen) == 1:
        return ""
    return f": at least one of its depending tensors, '{seen[-1]}', is not connected"
