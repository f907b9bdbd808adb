"""An infer request of the v2 protocol: its JSON and binary data to the message; no I/O."""

from collections.abc import Iterable
from typing import NamedTuple

from gateway.config import ModelConfig
from gateway.frontends.http import members
from gateway.frontends.http.infer_inputs import InputReader
from gateway.frontends.http.json_object import parse_request
from gateway.frontends.http.known_requests import KnownRequest, KnownRequests
from gateway.frontends.http.raw_input import raw_input
from gateway.frontends.http.request_parameters import read_parameters, with_headers
from gateway.frontends.http.requested_outputs import OutputForms, read_outputs
from gateway.messages import InferRequest
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import Tensor


class Target(NamedTuple):
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
        self._known = KnownRequests()

    def decode(
        self, target: Target, header: bytes | memoryview, binary: memoryview
    ) -> tuple[InferRequest, OutputForms]:
        """The request whose JSON is `header`, with the bytes behind it (binary tensor extension).

        Checks what the wire demands, in Triton's order; raises InferenceError.
        """
        if not isinstance(header, bytes):
            return self._read(target, header, binary)
        known = self._known.get(header, len(binary))
        if known is None:
            return self._read(target, header, binary)
        return _request(target, known, known.inputs(binary)), known.forms

    def _read(
        self, target: Target, header: bytes | memoryview, binary: memoryview
    ) -> tuple[InferRequest, OutputForms]:
        found = parse_request(header)
        request_id = members.string(found, "id") if "id" in found else ""
        parameters = read_parameters(found)
        reader = InputReader(target.config, binary, self._shared_memory, self._limit)
        inputs = reader.read(found, request_id)
        outputs, forms = read_outputs(found, self._shared_memory, default=parameters.binary_output)
        meaning = KnownRequest(len(binary), request_id, parameters, reader.pieces, outputs, forms)
        request = _request(target, meaning, inputs)
        if (
            isinstance(header, bytes)
            and inputs
            and len(reader.pieces) == len(inputs)
            and not any(each.region for each in outputs)
        ):
            self._known.add(header, meaning)
        return request, forms

    def decode_raw(self, target: Target, body: memoryview) -> tuple[InferRequest, OutputForms]:
        """The request whose body is the data of its only input (raw binary request)."""
        parameters = with_headers({}, target.headers)
        request = InferRequest(
            model=target.config.name,
            version=target.version,
            inputs=(raw_input(target.config, body),),
            parameters=parameters,
            received_ns=target.received_ns,
        )
        return request, OutputForms(default=True, only_binary=True)


def _request(target: Target, known: KnownRequest, inputs: tuple[Tensor, ...]) -> InferRequest:
    parameters = known.parameters
    return InferRequest(
        model=target.config.name,
        version=target.version,
        id=known.id,
        inputs=inputs,
        outputs=known.outputs,
        parameters=with_headers(parameters.custom, target.headers),
        sequence=parameters.sequence,
        priority=parameters.priority,
        timeout_us=parameters.timeout_us,
        received_ns=target.received_ns,
    )
