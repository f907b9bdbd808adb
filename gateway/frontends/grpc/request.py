"""A ModelInferRequest to an InferRequest; no I/O but reading shared memory."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.inputs import NO_CONTENTS, Contents, InputReader
from gateway.frontends.grpc.parameters import HeaderForwarding, read_parameters
from gateway.frontends.grpc.regions import read_region
from gateway.frontends.grpc.rpc import Metadata
from gateway.messages import InferRequest, RequestedOutput, asked_once
from gateway.protos import grpc_service_pb2 as pb
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Buffer

CLASSIFICATION = "classification"


class Decoded:
    """A large message that was decoded in a thread, or why it cannot be."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: InferRequest | InferenceError) -> None:
        self._outcome = outcome

    def request(self) -> InferRequest:
        """The request; raises the InferenceError instead."""
        if isinstance(self._outcome, InferenceError):
            raise self._outcome
        return self._outcome


class RequestDecoder:
    """Decodes the requests of one RPC, to each of which it may forward the RPC's metadata."""

    def __init__(
        self, shared_memory: SharedMemory, forwarding: HeaderForwarding, metadata: Metadata
    ) -> None:
        self._shared_memory = shared_memory
        self._forwarding = forwarding
        self._metadata = metadata

    def decode(
        self,
        message: pb.ModelInferRequest,
        raw: Sequence[Buffer] | Decoded,
        config: ModelConfig,
        contents: Contents = NO_CONTENTS,
    ) -> InferRequest:
        """A request for a model with this config; InferenceError with Triton's texts.

        `raw` are its raw contents, wherever they are kept, or all of it, decoded before.
        `contents` are typed contents that are not in the message.
        """
        if isinstance(raw, Decoded):
            return raw.request()
        received_ns = time.perf_counter_ns()
        parameters = read_parameters(message.parameters)
        if self._forwarding.enabled:
            parameters.custom.update(self._forwarding.select(self._metadata))
        reader = InputReader(message, raw, config, self._shared_memory, contents)
        return InferRequest(
            model=message.model_name,
            version=message.model_version,
            id=message.id,
            # Slices are lists, which are faster to go through than protobuf's own sequences.
            inputs=tuple([reader.read(tensor) for tensor in message.inputs[:]]),
            outputs=self._outputs(message.outputs[:]),
            parameters=parameters.custom,
            sequence=parameters.sequence,
            priority=parameters.priority,
            timeout_us=parameters.timeout_us,
            received_ns=received_ns,
        )

    def _outputs(self, given: Sequence[Any]) -> tuple[RequestedOutput, ...]:
        found = [self._output(output) for output in given]
        return tuple(found) if len(found) < 2 else asked_once(found)

    def _output(self, output: Any) -> RequestedOutput:
        if output.parameters:
            return self._special_output(output.name, output.parameters)
        return RequestedOutput(output.name)

    def _special_output(
        self, name: str, parameters: Mapping[str, pb.InferParameter]
    ) -> RequestedOutput:
        region = read_region(name, parameters)
        classes = _classes(parameters)
        if region is None:
            return RequestedOutput(name, classes)
        if classes:
            raise InferenceError(
                Code.INVALID_ARG,
                "output can't set both 'shared_memory_region' and 'classification'",
            )
        return RequestedOutput(name, region=self._shared_memory.locate(region))


def _classes(parameters: Mapping[str, pb.InferParameter]) -> int:
    if CLASSIFICATION not in parameters:
        return 0
    found = parameters[CLASSIFICATION]
    if found.WhichOneof("parameter_choice") != "int64_param":
        raise InferenceError(
            Code.INVALID_ARG,
            "invalid value type for 'classification' parameter, expected int64_param",
        )
    if found.int64_param <= 0:
        raise InferenceError(
            Code.INVALID_ARG, "invalid value for 'classification' parameter, expected >= 0"
        )
    return found.int64_param
