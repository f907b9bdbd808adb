"""ModelStreamInfer as real clients call it: grpc.aio without decoding, and the official one."""

import queue
import struct
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import numpy as np
from tritonclient import grpc as triton_client
from tritonclient.grpc import service_pb2 as pb

from loadtests.sse import Address, Count, StreamFailed

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
MODEL = "repeat"
TEXT = "token "

# Each channel has a connection of its own, as clients in processes of their own have.
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


def repeat_request(count: int, delay_us: int = 0) -> bytes:
    """A serialized request for `count` responses."""
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(struct.pack("<I", len(TEXT)) + TEXT.encode())
    for name, value in (("n", count), ("delay_us", delay_us)):
        request.inputs.add(name=name, datatype="INT32", shape=[1])
        request.raw_input_contents.append(struct.pack("<i", value))
    return bytes(request.SerializeToString())


async def count_messages(address: Address, request: bytes) -> int:
    """One stream of grpc.aio that leaves messages as bytes; how many came."""
    async with grpc.aio.insecure_channel(str(address), options=OWN_CONNECTION) as channel:
        open_stream: Any = channel.stream_stream(METHOD)
        call = open_stream(iter([request]))
        found = 0
        while await call.read() is not grpc.aio.EOF:
            found += 1
    return found


class OfficialClient:
    """Streams of the official client, one client per stream; its answers come by callback."""

    def __init__(self, address: Address, streams: int) -> None:
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._clients = [
            triton_client.InferenceServerClient(str(address), channel_args=OWN_CONNECTION)
            for _ in range(streams)
        ]
        for client in self._clients:
            client.start_stream(partial(_put, self._answers))

    def count(self, responses: int) -> Count:
        """Ask each stream for so many responses, and wait for all of them."""
        for client in self._clients:
            client.async_stream_infer(MODEL, _inputs(responses))
        for _ in range(responses * len(self._clients)):
            if (error := self._answers.get(timeout=60)) is not None:
                raise StreamFailed(str(error))
        return Count(responses * len(self._clients), time.perf_counter())


def _put(answers: "queue.SimpleQueue[Any]", result: Any, error: Any) -> None:
    answers.put(error)


def _inputs(responses: int) -> Sequence[Any]:
    text = triton_client.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([TEXT.encode()], dtype=np.object_))
    count = triton_client.InferInput("n", [1], "INT32")
    count.set_data_from_numpy(np.array([responses], dtype=np.int32))
    return [text, count]
