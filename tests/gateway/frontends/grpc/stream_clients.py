"""A client of ModelStreamInfer without a transport."""

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.outbox import Outbox
from gateway.frontends.grpc.parameters import HeaderForwarding
from gateway.frontends.grpc.protobuf_wire import Message
from gateway.frontends.grpc.request import RequestDecoder
from gateway.frontends.grpc.stream_infer import StreamInfer
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from tests.builders import (
    DECOUPLED,
    TEXT,
    Execution,
    LoadedModels,
    ScriptedInstance,
    soon,
)

BROKEN = InferenceError(Code.INVALID_ARG, "no such token")

MANY = replace(TEXT, name="many", model_transaction_policy=DECOUPLED)

ONE = replace(TEXT, name="one")


class StreamClient:
    """One RPC driven by hand: the test is the client.

    While it `writes`, messages may be sent at once: `written` counts those.
    """

    def __init__(
        self,
        *models: Model,
        strict: bool = False,
        send_timeout_secs: float = 60.0,
        requests: AsyncIterable[Message] | None = None,
    ) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.taken = self.written = 0
        self.writes = False
        self._asked: asyncio.Queue[pb.ModelInferRequest | None] = asyncio.Queue()
        self._answers: asyncio.Queue[pb.ModelStreamInferResponse] = asyncio.Queue()
        dataplane = DataPlane(LoadedModels(*models))  # type: ignore[arg-type]
        decoder = RequestDecoder(dataplane.shared_memory, HeaderForwarding(""), ())
        outbox = Outbox(self._send, send_timeout_secs, self._write)
        self.rpc = StreamInfer(dataplane, decoder, outbox, strict=strict)
        self._sent = requests or self._requests()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.rpc.run(self._sent))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        assert self._task is not None
        await soon(asyncio.wait([self._task]))

    def ask(
        self, model: str, request_id: str, *, version: str = "", empty_final: bool = False
    ) -> None:
        """Send a request whose text is its id."""
        tensor = pb.ModelInferRequest.InferInputTensor(
            name="text_input", datatype="BYTES", shape=[1]
        )
        tensor.contents.bytes_contents.append(request_id.encode())
        message = pb.ModelInferRequest(
            model_name=model, model_version=version, id=request_id, inputs=[tensor]
        )
        if empty_final:
            message.parameters["triton_enable_empty_final_response"].bool_param = True
        self._asked.put_nowait(message)

    def say(self, model: str, text: str, request_id: str, *, start: bool = False) -> None:
        """Send a turn of one conversation."""
        message = pb.ModelInferRequest(model_name=model, id=request_id)
        tensor = message.inputs.add(name="messages", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(json.dumps([{"content": text}]).encode())
        message.parameters["sequence_id"].int64_param = 7
        message.parameters["sequence_start"].bool_param = start
        self._asked.put_nowait(message)

    def cancel_request(self, model: str, request_id: str, *, wanted: bool = True) -> None:
        """Ask for the end of a request."""
        message = pb.ModelInferRequest(model_name=model, id=request_id)
        message.parameters["cancel"].bool_param = wanted
        self._asked.put_nowait(message)

    def half_close(self) -> None:
        """Send no more."""
        self._asked.put_nowait(None)

    def cancel(self) -> None:
        """Cancel the RPC."""
        assert self._task is not None
        self._task.cancel()

    async def answer(self) -> pb.ModelStreamInferResponse:
        """Read one message."""
        return await soon(self._answers.get())

    async def said(self) -> tuple[str, str]:
        """The id and the text of the next message."""
        message = await self.answer()
        assert message.error_message == ""
        (raw,) = message.infer_response.raw_output_contents
        return message.infer_response.id, raw[4:].decode()

    @property
    def unread(self) -> int:
        """The number of requests that the server has not read yet."""
        return self._asked.qsize()

    @property
    def silent(self) -> bool:
        """Whether there is no message to read."""
        return self._answers.empty()

    async def ended(self) -> None:
        """Wait for the end of the RPC; raises what it raised."""
        assert self._task is not None
        await soon(asyncio.shield(self._task))

    async def _requests(self) -> AsyncIterator[Message]:
        while (message := await self._asked.get()) is not None:
            yield message, message.raw_input_contents

    async def _send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.taken += 1
            await self.reads.wait()
            self._answers.put_nowait(pb.ModelStreamInferResponse.FromString(message))

    def _write(self, messages: Sequence[bytes]) -> bool:
        if self.writes:
            self.written += len(messages)
            for message in messages:
                self._answers.put_nowait(pb.ModelStreamInferResponse.FromString(message))
        return self.writes


def final_flag(message: pb.ModelStreamInferResponse) -> bool | None:
    parameters = message.infer_response.parameters
    if "triton_final_response" not in parameters:
        return None
    return parameters["triton_final_response"].bool_param


async def begun(instance: ScriptedInstance, count: int) -> list[Execution]:
    return [await instance.begun() for _ in range(count)]
