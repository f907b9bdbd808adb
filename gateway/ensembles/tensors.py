"""Tensors of an ensemble: requests of its steps, their responses, and its own responses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.batches.shapes import agree, as_model_sees
from gateway.config import ModelConfig
from gateway.ensembles.graph import Step, StepPlan
from gateway.errors import Code, InferenceError
from gateway.messages import (
    NO_PARAMETERS,
    InferRequest,
    InferResponse,
    Parameter,
    RequestedOutput,
    SequenceTag,
)
from gateway.policy.caller import tenant_of
from gateway.tensor import Tensor

Shape = tuple[int, ...]
NO_SEQUENCE = SequenceTag(0)


@dataclass(frozen=True, slots=True)
class EnsembleTensor:
    """A tensor of the ensemble; None for an optional input or output that is missing.

    `rows` is the batch size of its request, 0 without a batch dimension. `tag` is the sequence tag
    of its response; None for an input of the ensemble.
    """

    tensor: Tensor | None
    rows: int = 0
    tag: SequenceTag | None = None


class StepRequests:
    """Requests of one step; tensors are views."""

    def __init__(self, step: Step, member: ModelConfig) -> None:
        self._step = step
        self._batching = member.batching
        self._dims = {each.name: each.dims for each in member.input}
        self._outputs = tuple(RequestedOutput(name) for name, _ in step.outputs)

    def make(self, asked: InferRequest, values: Mapping[str, EnsembleTensor]) -> InferRequest:
        """The request of the step, with id, parameters and priority of the ensemble's request.

        The sequence tag of a response takes precedence over that of the request.
        """
        step, tag = self._step, asked.sequence
        inputs = []
        for name, source in step.inputs:
            value = values[source]
            tag = value.tag or tag
            if value.tensor is not None:
                inputs.append(self._input(name, value.tensor, value.rows))
        return InferRequest(
            model=step.model,
            id=asked.id,
            inputs=tuple(inputs),
            outputs=self._outputs,
            parameters=asked.parameters,
            sequence=_of_tenant(tag, asked) if tag not in (None, NO_SEQUENCE) else None,
            priority=asked.priority,
            timeout_us=asked.timeout_us,
            trace=asked.trace,
            caller=asked.caller,
            uncounted=asked.uncounted,
        )

    def rows(self, request: InferRequest) -> int:
        """The batch size of a request; 0 if the member does not batch."""
        if not self._batching:
            return 0
        return next((tensor.shape[0] for tensor in request.inputs if tensor.shape), 1)

    def _input(self, name: str, tensor: Tensor, rows: int) -> Tensor:
        # The member refuses an unknown name.
        dims = self._dims.get(name, tensor.shape)
        shape = converted(tensor.shape, rows, dims, batching=self._batching)
        return Tensor(name, tensor.datatype, shape, tensor.data)


def given(config: ModelConfig, request: InferRequest) -> Iterator[tuple[str, EnsembleTensor]]:
    """The inputs of an ensemble's request; an optional one may be missing."""
    for each in config.input:
        tensor = request.input(each.name)
        if tensor is None:
            yield each.name, EnsembleTensor(None)
            continue
        rows = tensor.shape[0] if config.batching else 0
        yield each.name, EnsembleTensor(tensor, rows)


def made(
    step: Step, response: InferResponse, rows: int, tag: SequenceTag
) -> list[tuple[str, EnsembleTensor]]:
    """The tensors that a step's response adds to the ensemble.

    `rows` is the batch size of the request and `tag` its sequence tag, which parameters of the
    response may change. Raises INVALID_ARG if such a parameter has another type.
    """
    if response.parameters:
        tag = _changed_tag(response.parameters, tag)
    found = {tensor.name: tensor for tensor in response.outputs}
    return [(tensor, EnsembleTensor(found.get(name), rows, tag)) for name, tensor in step.outputs]


def _changed_tag(parameters: Mapping[str, Parameter], tag: SequenceTag) -> SequenceTag:
    """The sequence tag that a response sets; flags that it omits are then off."""
    sequence_id = parameters.get("sequence_id", tag.correlation_id)
    if isinstance(sequence_id, bool) or not isinstance(sequence_id, int | str):
        raise InferenceError(
            Code.INVALID_ARG,
            "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or "
            "TRITONSERVER_PARAMETER_STRING",
        )
    flags = [parameters.get(f"sequence_{each}") for each in ("start", "end")]
    for name, value in zip(("start", "end"), flags, strict=True):
        if value is not None and not isinstance(value, bool):
            raise InferenceError(
                Code.INVALID_ARG,
                f"expect parameter 'sequence_{name}' to be TRITONSERVER_PARAMETER_BOOL",
            )
    if "sequence_id" not in parameters and flags == [None, None]:
        return tag
    return SequenceTag(sequence_id, start=bool(flags[0]), end=bool(flags[1]))


def _of_tenant(tag: SequenceTag | None, asked: InferRequest) -> SequenceTag | None:
    """The tag of a step, which is of the tenant of the ensemble's request."""
    tenant = tenant_of(asked.caller)
    return replace(tag, tenant=tenant) if tag is not None and tag.tenant != tenant else tag


class EnsembleResponses:
    """Responses of the ensemble."""

    def __init__(self, config: ModelConfig) -> None:
        self._batching = config.batching
        self._outputs = {each.name: each for each in as_model_sees(config).output}
        self._cached = config.response_cache is not None and config.response_cache.enable

    def make(self, plan: StepPlan, values: Mapping[str, EnsembleTensor]) -> InferResponse:
        """A response with the requested outputs that exist.

        As on Triton it has the sequence's parameters, unless responses are cached for other
        requests.
        """
        outputs, tag = [], None
        for name in plan.outputs:
            value = values[name]
            tag = value.tag or tag
            if value.tensor is not None:
                outputs.append(self._output(name, value.tensor, value.rows))
        parameters = NO_PARAMETERS if tag is None or self._cached else _parameters(tag)
        return InferResponse(outputs=tuple(outputs), parameters=parameters)

    def _output(self, name: str, tensor: Tensor, rows: int) -> Tensor:
        output = self._outputs[name]
        shape = converted(tensor.shape, rows, output.dims, batching=self._batching)
        return Tensor(name, tensor.datatype, shape, tensor.data)


def _parameters(tag: SequenceTag) -> dict[str, Parameter]:
    return {
        "sequence_id": tag.correlation_id,
        "sequence_start": tag.start,
        "sequence_end": tag.end,
    }


def converted(shape: Shape, rows: int, dims: Sequence[int], *, batching: bool) -> Shape:
    """The shape of a tensor for a reader of `dims`, after a batch dimension if `batching`.

    `rows` is the batch size of its writer, 0 without a batch dimension. A batch dimension of 1 is
    added or removed if the shapes do not agree; other mismatches are refused later.
    """
    if batching == bool(rows):
        return shape
    if batching:
        return (1, *shape) if agree(dims, shape) else shape
    return shape[1:] if rows == 1 and not agree(dims, shape) else shape
