"""The gRPC client of the chat: index and metadata of models, answers by ModelStreamInfer."""

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import Any

import grpc

from gateway.protos import grpc_service_pb2 as pb
from gateway.protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from gateway.tools.chat.server import (
    FINISH_REASON,
    NO_HEADERS,
    NUM_OUTPUT_TOKENS,
    TEXT_OUTPUT,
    AnswerPart,
    ChatModel,
    ChatServer,
    Listed,
    Question,
    Refused,
    Unreachable,
    refusal,
)

DEFAULT_PORT = 8001
ANSWERS_WITHIN_SECS = 10.0
"""Time limit of index and metadata requests; answers have none."""

CHANNEL = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A restarted server is found at the next question.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
)
LENGTH_BYTES = 4
"""An element of BYTES begins with its length (binary tensor data extension)."""

OTHER_WIRE = "http1.x server"
"""Part of grpc's error text for a server that answers in HTTP/1."""

NO_INDEX = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED)
SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class GrpcChatServer(ChatServer):
    """One connection. `target` is HOST:PORT, or any other name that gRPC resolves."""

    def __init__(self, target: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        self.url = target
        self._metadata = tuple(headers.items())
        self._channel = grpc.aio.insecure_channel(target, options=CHANNEL)
        self._stub: Any = GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    async def models(self) -> Sequence[Listed] | None:
        request = pb.RepositoryIndexRequest()
        try:
            found = await self._answer_of(self._stub.RepositoryIndex, request)
        except _NoIndex:
            return None
        return [Listed(each.name, each.state, each.reason) for each in found.models]

    async def describe(self, name: str) -> ChatModel:
        found = await self._answer_of(self._stub.ModelMetadata, pb.ModelMetadataRequest(name=name))
        return ChatModel(
            name=name,
            platform=found.platform,
            inputs={each.name: len(each.shape) for each in found.inputs},
            outputs=frozenset(each.name for each in found.outputs),
        )

    async def answer(self, question: Question) -> AsyncGenerator[AnswerPart, None]:
        call = self._stub.ModelStreamInfer(iter([_request(question)]), metadata=self._metadata)
        try:
            async for message in call:
                if message.error_message:
                    raise refusal(question.model.name, message.error_message)
                yield _part(message.infer_response)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()

    async def _answer_of(self, method: Any, request: Any) -> Any:
        call: Awaitable[Any] = method(request, timeout=ANSWERS_WITHIN_SECS, metadata=self._metadata)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None

    def _failure(self, error: grpc.aio.AioRpcError) -> Exception:
        details = error.details() or error.code().name
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            details = f"what answers at {self.url} speaks gRPC, but not the v2 protocol: {details}"
        if error.code() in NO_INDEX:
            return _NoIndex(details)
        if OTHER_WIRE in details:
            return Refused(
                f"{self.url} speaks HTTP instead of gRPC: give the gRPC port, {DEFAULT_PORT} by "
                "default, or add --http"
            )
        if error.code() in SILENT:
            # The reason stands behind the addresses that were tried.
            return Unreachable(
                f"no server answers at {self.url}: {details.rsplit(': ')[-1].rstrip(']')}"
            )
        return Refused(details)


class _NoIndex(Refused):
    """The server does not know the method, or the key is not allowed to use it."""


def _request(question: Question) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=question.model.name)
    for name, value in question.parameters().items():
        _set(request.parameters[name], value)
    for name, given in question.inputs().items():
        tensor = request.inputs.add(name=name, shape=[1] * question.model.inputs[name])
        if isinstance(given, bool):
            tensor.datatype = "BOOL"
            tensor.contents.bool_contents.append(given)
        else:
            tensor.datatype = "BYTES"
            tensor.contents.bytes_contents.append(given.encode())
    return request


def _set(parameter: pb.InferParameter, value: str | bool | int | float) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def _part(response: pb.ModelInferResponse) -> AnswerPart:
    raw = response.raw_output_contents
    outputs = {
        output.name: _first_element(output, raw[index] if index < len(raw) else b"")
        for index, output in enumerate(response.outputs)
    }
    tokens = outputs.get(NUM_OUTPUT_TOKENS)
    return AnswerPart(
        text=_text(outputs.get(TEXT_OUTPUT)),
        tokens=None if tokens is None else int.from_bytes(tokens, "little"),
        finish_reason=_text(outputs.get(FINISH_REASON)),
    )


def _first_element(output: pb.ModelInferResponse.InferOutputTensor, raw: bytes) -> bytes:
    """The bytes of a tensor's first element: of a text without its length."""
    if output.datatype != "BYTES":
        elements = 1
        for dim in output.shape:
            elements *= dim
        return raw[: len(raw) // max(elements, 1)]
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    return raw[LENGTH_BYTES : LENGTH_BYTES + length]


def _text(element: bytes | None) -> str:
    return (element or b"").decode(errors="replace")
