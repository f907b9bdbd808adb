"""An infer request of the v2 protocol: its JSON and binary data to the message; no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.config import ModelConfig
from gateway.frontends.http import members
from gateway.frontends.http.input_reader import InputReader
from gateway.frontends.http.raw_input import raw_input
from gateway.frontends.http.request_json import parse_request
from gateway.frontends.http.request_parameters import (
    RequestParameters,
    add_headers,
    read_parameters,
)
from gateway.frontends.http.requested_outputs import OutputForms, read_outputs
from gateway.messages import InferRequest
from gateway.shared_memory.regions import SharedMemory


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a request is for, and what comes beside its body.

    `version` is as asked for; `headers` are those that the model is to get.
    """

    config: ModelConfig
    version: str = ""
    headers: Iterable[tuple[str, str]] = ()
    received_ns: int = 0


class InferDecoder:
    """Decodes requests. What it makes holds views of their bodies, no copies.

    `limit` is the most bytes that an input given in JSON may have.
    """

    def __init__(self, shared_memory: SharedMemory, limit: int) -> None:
        self._shared_memory = shared_memory
        self._limit = limit

    def decode(
        self, target: Target, header: bytes, binary: memoryview
    ) -> tuple[InferRequest, OutputForms]:
        """The request whose JSON is `header`, with the bytes behind it (binary tensor extension).

        Checks what the wire demands, in Triton's order; raises InferenceError.
        """
        found = parse_request(header)
        request_id = members.string(found, "id") if "id" in found else ""
        parameters = read_parameters(found)
        reader = InputReader(target.config, binary, self._shared_memory, self._limit)
        inputs = reader.read(found, request_id)
        outputs, forms = read_outputs(found, self._shared_memory, default=parameters.binary_output)
        add_headers(parameters, target.headers)
        return (
            InferRequest(
                model=target.config.name,
                version=target.version,
                id=request_id,
                inputs=inputs,
                outputs=outputs,
                parameters=parameters.custom,
                sequence=parameters.sequence,
                priority=parameters.priority,
                timeout_us=parameters.timeout_us,
                received_ns=target.received_ns,
            ),
            forms,
        )

    def decode_raw(self, target: Target, body: memoryview) -> tuple[InferRequest, OutputForms]:
        """The request whose body is the data of its only input (raw binary request)."""
        parameters = RequestParameters()
        add_headers(parameters, target.headers)
        request = InferRequest(
            model=target.config.name,
            version=target.version,
            inputs=(raw_input(target.config, body),),
            parameters=parameters.custom,
            received_ns=target.received_ns,
        )
        return request, OutputForms(default=True)
