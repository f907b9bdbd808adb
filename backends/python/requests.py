"""Requests as a worker reads them, and the requests it makes of other models."""

import json
from collections.abc import Sequence
from typing import Any

import orjson

from backends.python.tensors import TensorReader, TensorWriter
from backends.python.worker.sluice_worker.messages import ToWorker
from gateway.config import ModelConfig
from gateway.messages import InferRequest, RequestedOutput, SequenceTag

START, END = 1, 2
ANY_VERSION = -1


class RequestEncoder:
    """Writes the requests of one `model`; whoever names no outputs asks for all of them.

    `alone` says that a request's execution may be chosen as soon as it comes, `decoupled` that it
    may have any number of responses.
    """

    def __init__(self, config: ModelConfig, version: int) -> None:
        self.model = config.name
        self.alone = _executes_alone(config)
        self.decoupled = config.decoupled
        self._version = version
        self._outputs = [each.name for each in config.output]

    def write(self, requests: Sequence[InferRequest], tensors: TensorWriter) -> list[list[Any]]:
        """Write the inputs of each request; OSError if no memory can be shared."""
        return [[tensors.write(tensor) for tensor in request.inputs] for request in requests]

    def encode(
        self,
        execution: int,
        first: int,
        requests: Sequence[InferRequest],
        inputs: Sequence[list[Any]],
    ) -> bytes:
        """The header of EXECUTE; requests are numbered from `first` on, `inputs` are written."""
        described = [
            self._describe(number, request, written)
            for number, (request, written) in enumerate(zip(requests, inputs, strict=True), first)
        ]
        return to_json([ToWorker.EXECUTE, execution, described])

    def _describe(self, number: int, request: InferRequest, inputs: list[Any]) -> list[Any]:
        sequence = request.sequence
        return [
            number,
            self.model,
            self._version,
            request.id,
            None if sequence is None else sequence.correlation_id,
            0 if sequence is None else START * sequence.start + END * sequence.end,
            request.timeout_us,
            request.priority,
            dict(request.parameters),
            [each.name for each in request.outputs] or self._outputs,
            inputs,
        ]


def _executes_alone(config: ModelConfig) -> bool:
    """Whether no scheduler would have put other requests with one, had it waited longer."""
    scheduled = config.dynamic_batching or config.sequence_batching
    limited = any(group.rate_limiter is not None for group in config.instance_group)
    return scheduled is None and not limited


def to_json(header: list[Any]) -> bytes:
    """A header as bytes, whatever the numbers and texts in it."""
    try:
        return orjson.dumps(header)
    except TypeError:  # integers beyond 64 bits, texts that are not UTF-8
        return json.dumps(header).encode()


def read_request(
    found: list[Any], tensors: TensorReader, traced: InferRequest | None
) -> InferRequest:
    """A request that a model makes of another one; its trace is a part of that of `traced`."""
    (
        _,
        model,
        version,
        request_id,
        correlation,
        flags,
        timeout,
        priority,
        parameters,
        outputs,
        inputs,
    ) = found
    return InferRequest(
        model=model,
        version="" if version in (ANY_VERSION, "", None) else str(version),
        id=request_id,
        inputs=tuple([tensors.read(each) for each in inputs]),
        outputs=tuple([RequestedOutput(name) for name in outputs]),
        parameters=parameters or {},
        sequence=_sequence(correlation, flags),
        priority=priority or 0,
        timeout_us=timeout or 0,
        trace=None if traced is None else traced.trace,
    )


def _sequence(correlation: int | str | None, flags: int) -> SequenceTag | None:
    if not correlation:
        return None
    return SequenceTag(correlation, start=bool(flags & START), end=bool(flags & END))
