"""The messages of gRPC's own test service, compiled from `testing.proto`."""

import tempfile
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

SOURCE = Path(__file__).with_name("testing.proto")
PACKAGE = "grpc.testing"


def _compiled() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "testing.binpb")
        status = protoc.main(
            ("protoc", f"-I{SOURCE.parent}", f"--descriptor_set_out={out}", SOURCE.name)
        )
        assert status == 0, f"protoc cannot compile {SOURCE.name}"
        described = FileDescriptorSet.FromString(out.read_bytes())
    pool: Any = DescriptorPool()
    for file in described.file:
        pool.Add(file)
    return pool


POOL = _compiled()
SERVICE = POOL.FindServiceByName(f"{PACKAGE}.TestService")


def message(name: str) -> Any:
    """The class of a message."""
    return GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


Empty = message("Empty")
SimpleRequest = message("SimpleRequest")
SimpleResponse = message("SimpleResponse")
StreamingInputCallRequest = message("StreamingInputCallRequest")
StreamingInputCallResponse = message("StreamingInputCallResponse")
StreamingOutputCallRequest = message("StreamingOutputCallRequest")
StreamingOutputCallResponse = message("StreamingOutputCallResponse")


def unary(response_size: int = 0, payload_size: int = 0, **fields: Any) -> Any:
    """A request of UnaryCall, with `payload_size` zeros in it."""
    payload = {"body": bytes(payload_size)}
    return SimpleRequest(response_size=response_size, payload=payload, **fields)


def upload(size: int) -> Any:
    """A request of StreamingInputCall."""
    return StreamingInputCallRequest(payload={"body": bytes(size)})


NEVER_US = 600_000_000
"""A pause that no test waits for."""


def download(*sizes: int, payload_size: int = 0, sleeps: bool = False, **fields: Any) -> Any:
    """A request for responses of these sizes; it may have the server sleep before the last."""
    return StreamingOutputCallRequest(
        response_parameters=[
            {"size": size, "interval_us": NEVER_US if sleeps and number == len(sizes) else 0}
            for number, size in enumerate(sizes, 1)
        ],
        payload={"body": bytes(payload_size)},
        **fields,
    )
