"""The four official clients behind one face, and what they report in one form."""

import gc
import inspect
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from google.protobuf import json_format
from google.protobuf.message import Message
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from tests.serving import WAIT_SECS, Serving

WIRES = ("http", "grpc", "http.aio", "grpc.aio")
STATUS = {
    "NOT_FOUND": "404",
    "INVALID_ARGUMENT": "400",
    "UNAVAILABLE": "503",
    "INTERNAL": "500",
    "UNIMPLEMENTED": "501",
}
"""The HTTP status for each gRPC code."""


class Client:
    """One official client; its answers are messages of the protocol on either wire."""

    def __init__(self, wire: str, client: Any) -> None:
        self.wire = wire
        self.over_http = wire.startswith("http")
        self._client = client

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the client, and wait for what it returns."""
        found = getattr(self._client, method)(*arguments, **options)
        return await found if inspect.isawaitable(found) else found

    async def refusal(self, method: str, *arguments: Any, **options: Any) -> tuple[str, str]:
        """Code and text of the error that a call ends with."""
        try:
            found = await self.call(method, *arguments, **options)
        except InferenceServerException as error:
            return str(error.status()).removeprefix("StatusCode."), error.message()
        raise AssertionError(f"{method} was not refused: {found}")

    def code(self, name: str) -> str:
        """A code of gRPC's as this client shows it."""
        return STATUS[name] if self.over_http else name

    async def metadata(self, model: str, version: str = "") -> Any:
        """A ModelMetadataResponse."""
        return await self._message(
            service_pb2.ModelMetadataResponse(), "get_model_metadata", model, version
        )

    async def server_metadata(self) -> Any:
        """A ServerMetadataResponse."""
        return await self._message(service_pb2.ServerMetadataResponse(), "get_server_metadata")

    async def statistics(self, model: str = "", version: str = "") -> Any:
        """A ModelStatisticsResponse."""
        return await self._message(
            service_pb2.ModelStatisticsResponse(), "get_inference_statistics", model, version
        )

    async def config(self, model: str, version: str = "") -> Any:
        """A ModelConfig."""
        if not self.over_http:
            return (await self.call("get_model_config", model, version)).config
        return await self._message(
            model_config_pb2.ModelConfig(), "get_model_config", model, version
        )

    async def _message(self, message: Message, method: str, *arguments: str) -> Any:
        found = await self.call(method, *arguments)
        return json_format.ParseDict(found, message) if self.over_http else found


@asynccontextmanager
async def connect(server: Serving, wire: str) -> AsyncIterator[Client]:
    """One of the clients, closed at the end of the block."""
    client = Client(wire, _open(server, wire))
    try:
        yield client
    finally:
        await client.call("close")
        if wire == "http.aio":
            _collect_responses()


def _collect_responses() -> None:
    """The client's yes-or-no calls (is_server_live, ...) forget to release their responses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unclosed connection", ResourceWarning)
        gc.collect()


def _open(server: Serving, wire: str) -> Any:
    address = server.http.removeprefix("http://")
    if wire == "http":
        return tritonclient.http.InferenceServerClient(
            address, connection_timeout=WAIT_SECS, network_timeout=WAIT_SECS
        )
    if wire == "http.aio":
        return tritonclient.http.aio.InferenceServerClient(address, conn_timeout=WAIT_SECS)
    if wire == "grpc":
        return tritonclient.grpc.InferenceServerClient(server.grpc)
    return tritonclient.grpc.aio.InferenceServerClient(server.grpc)


def text(name: str, *values: str | bytes, shape: list[int] | None = None) -> Any:
    """A BYTES input of gRPC's client."""
    return tensor(name, "BYTES", np.array(values, dtype=object), shape)


def tensor(name: str, datatype: str, values: Any, shape: list[int] | None = None) -> Any:
    """An input of gRPC's client."""
    found = tritonclient.grpc.InferInput(name, list(values.shape), datatype)
    found.set_data_from_numpy(values)
    if shape is not None:
        found.set_shape(shape)
    return found
