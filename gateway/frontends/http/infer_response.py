"""Encoding of v2 infer responses: the message to JSON and binary data, then to an answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
from starlette.types import Receive, Scope, Send

from gateway.admission.quotas import headers_in
from gateway.classification import classify
from gateway.frontends.http.body import HEADER_LENGTH
from gateway.frontends.http.connection_parts import LENGTH
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.infer_request import OutputForms
from gateway.frontends.http.json_tensors import all_finite, is_large, written
from gateway.frontends.http.request_scope import (
    NO_STATE,
    SEND_WHOLE,
    TRACES,
    RequestState,
    send_apart,
)
from gateway.messages import InferResponse
from gateway.models.model import Model
from gateway.policy.pages import BINARY
from gateway.shared_memory.regions import SharedMemory
from gateway.tensor import CONVERTED, Buffer, Tensor

MOST_KNOWN = 256
"""Responses whose JSON is kept: it differs only in the id while names and shapes are equal."""
AS_JSON = (b"content-type", JSON.encode())
AS_BINARY = (b"content-type", BINARY.encode())


class Answered(NamedTuple):
    """A response to encode, with its model, id and forms."""

    model: Model
    request_id: str
    response: InferResponse
    forms: OutputForms


def takes_long(answered: Answered) -> bool:
    """Whether encoding needs a thread: large JSON, strings or shared memory."""
    outputs = answered.response.outputs
    if not answered.forms.only_binary:
        return is_large(outputs)
    for output in outputs:
        if type(output.data) is tuple:
            return is_large(outputs)
    return False


class EncodedResponse(NamedTuple):
    """The JSON and the binary data behind it, as views of the model's outputs.

    `has_binary`: the binary data is not empty.
    """

    header: bytes
    blobs: tuple[Buffer, ...] = ()
    has_binary: bool = False


class InferEncoder:
    """Encodes responses, and writes outputs into shared memory."""

    def __init__(self, shared_memory: SharedMemory) -> None:
        self._shared_memory = shared_memory
        self._binary_members = lru_cache(MOST_KNOWN)(_binary_members)

    def encode(
        self, model: Model, request_id: str, response: InferResponse, forms: OutputForms
    ) -> EncodedResponse:
        """The requested outputs, in the model's order.

        Raises INVALID_ARG for a datatype without a JSON form, INTERNAL if a region is too small.
        """
        if forms.only_binary and not response.parameters:
            return self._encode_binary(model, request_id, response, forms)
        found: dict[str, Any] = {"id": request_id} if request_id else {}
        found["model_name"] = model.name
        found["model_version"] = model.version
        if response.parameters:
            found["parameters"] = dict(response.parameters)
        blobs: list[Buffer] = []
        found["outputs"] = [
            self._output(model, output, forms, blobs)
            for output in response.outputs
            if forms.wants(output.name)
        ]
        return EncodedResponse(_dump(found), tuple(blobs), any(map(len, blobs)))

    def _encode_binary(
        self, model: Model, request_id: str, response: InferResponse, forms: OutputForms
    ) -> EncodedResponse:
        """The same for binary outputs alone: their JSON is kept."""
        blobs: list[Buffer] = []
        described, listed = [], forms.listed
        for output in response.outputs:
            if not listed or output.name in listed:
                data = output.data
                blobs.append(blob := output.raw() if isinstance(data, CONVERTED) else data)
                described.append((output.name, output.datatype, output.shape, len(blob)))
        members = self._binary_members(model.name, model.version, tuple(described))
        start = b'{"id":%b,' % orjson.dumps(request_id) if request_id else b"{"
        return EncodedResponse(start + members, tuple(blobs), any(map(len, blobs)))

    def _output(
        self, model: Model, output: Tensor, forms: OutputForms, blobs: list[Buffer]
    ) -> dict[str, Any]:
        asked = forms.listed.get(output.name)
        if asked is not None and asked.region is not None:
            self._shared_memory.write(asked.region, output)
            return _described(output)
        if asked is not None and asked.classes:
            labels = model.labels.get(output.name, ())
            output = classify(output, asked.classes, labels, batching=model.config.batching)
        described = _described(output)
        if not forms.is_binary(output.name):
            described["data"] = written(output)
            return described
        blob = output.raw()
        blobs.append(blob)
        described["parameters"] = {"binary_data_size": len(blob)}
        return described


def _described(output: Tensor) -> dict[str, Any]:
    return {"name": output.name, "datatype": output.datatype, "shape": output.shape}


def _binary_members(
    model: str, version: str, outputs: tuple[tuple[str, str, tuple[int, ...], int], ...]
) -> bytes:
    """The JSON of a response behind its id; an output is its name, datatype, shape and size."""
    found = [
        {
            "name": name,
            "datatype": datatype,
            "shape": shape,
            "parameters": {"binary_data_size": size},
        }
        for name, datatype, shape, size in outputs
    ]
    return orjson.dumps({"model_name": model, "model_version": version, "outputs": found})[1:]


def _dump(found: Mapping[str, Any]) -> bytes:
    parameters = found.get("parameters")
    if parameters and not all_finite([each for each in parameters.values() if type(each) is float]):
        # JSON has no NaN or infinity; as Triton, the server writes Python's literals.
        text = json.dumps(parameters, ensure_ascii=False, separators=(",", ":"))
        found = {**found, "parameters": orjson.Fragment(text)}
    return orjson.dumps(found)


@dataclass(slots=True)
class WholeAnswer:
    """A successful response, encoded; `lines` are further headers, as HTTP/1.1 has them."""

    headers: list[tuple[bytes, bytes]]
    parts: Sequence[Buffer]
    lines: bytes = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state: RequestState = scope.get("state", NO_STATE)
        send_whole = state.get(SEND_WHOLE)
        headers = [*self.headers, *headers_in(self.lines)] if self.lines else self.headers
        if send_whole is not None and TRACES not in scope:
            await send_whole(headers, self.parts)
        else:
            await send_apart(send, headers, self.parts)


def whole_answer(encoded: EncodedResponse) -> WholeAnswer:
    """The response without a content encoding; its length is the last header."""
    headers = [AS_JSON]
    if encoded.has_binary:
        headers = [AS_BINARY, (HEADER_LENGTH, b"%d" % len(encoded.header))]
    parts: list[Buffer] = [encoded.header, *encoded.blobs]
    headers.append((LENGTH, b"%d" % sum(map(len, parts))))
    return WholeAnswer(headers, parts)
