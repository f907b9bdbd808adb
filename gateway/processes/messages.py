"""Messages between the server and its frontend processes: kinds of frames, heads as JSON."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.types import Scope

from gateway.event_loop import LoopReading
from gateway.frontends.http.request_scope import BEGUN_NS, CERTIFICATE, HEADER_NAMES
from gateway.processes.channel import FrameKind

Pairs = Sequence[Sequence[str]]


def text_pairs(headers: Iterable[tuple[bytes, bytes]]) -> Pairs:
    """HTTP headers as text; each byte becomes a character (Latin-1)."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def byte_pairs(pairs: Pairs) -> list[tuple[bytes, bytes]]:
    """The HTTP headers of `text_pairs`."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]


def encodable(text: str) -> str:
    """A text that UTF-8 can encode; lone surrogates, as in file names, are replaced."""
    return text.encode("utf-8", "replace").decode()


def metadata_pairs(metadata: Iterable[tuple[str, str | bytes]]) -> Pairs:
    """gRPC metadata as text; each byte of a binary value becomes a character (Latin-1)."""
    return [
        (name, encodable(value) if isinstance(value, str) else value.decode("latin-1"))
        for name, value in metadata
    ]


def read_metadata(pairs: Pairs) -> list[tuple[str, str | bytes]]:
    """The gRPC metadata of `metadata_pairs`; values are bytes if the name ends in `-bin`."""
    return [
        (name, value.encode("latin-1") if name.endswith("-bin") else value) for name, value in pairs
    ]


AS_IS = ("http_version", "method", "scheme", "path", "root_path", "client", "server")
AS_TEXT = ("raw_path", "query_string")


def written_scope(scope: Scope, *, whole: bool) -> Mapping[str, Any]:
    """The ASGI scope of a request as JSON; `whole` marks a request whose body is complete."""
    found = {name: scope[name] for name in AS_IS}
    found |= {name: scope[name].decode("latin-1") for name in AS_TEXT}
    found["headers"] = text_pairs(scope["headers"])
    found["names"] = [name.decode("latin-1") for name in scope["state"][HEADER_NAMES]]
    found["whole"] = whole
    if BEGUN_NS in scope["state"]:
        found[BEGUN_NS] = scope["state"][BEGUN_NS]
    if CERTIFICATE in scope["state"]:
        found[CERTIFICATE] = encodable(scope["state"][CERTIFICATE])
    return found


def read_scope(head: Mapping[str, Any], state: dict[str, Any]) -> Scope:
    """The ASGI scope of `written_scope`, with another `state` plus what the connection found.

    That is the original header names, the time of the first byte, and the identity of the client's
    certificate, if any.
    """
    found: dict[str, Any] = {name: head[name] for name in AS_IS}
    found |= {name: head[name].encode("latin-1") for name in AS_TEXT}
    for address in ("client", "server"):
        found[address] = None if found[address] is None else tuple(found[address])
    names = [name.encode("latin-1") for name in head["names"]]
    state = {**state, HEADER_NAMES: names}
    for name in (BEGUN_NS, CERTIFICATE):
        if name in head:
            state[name] = head[name]
    return found | {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "headers": byte_pairs(head["headers"]),
        "state": state,
    }


LOOP = struct.Struct("!Qdd")
"""A count and two times in seconds."""


def written_loop(reading: LoopReading) -> bytes:
    """The blocks of a frontend's event loop, the payload of its PONG."""
    return LOOP.pack(*reading)


def read_loop(payload: bytes) -> LoopReading:
    """The reading of `written_loop`."""
    return LoopReading(*LOOP.unpack(payload))


class FrontendKind(FrameKind):
    """Kinds of frames between the server and its frontend processes.

    END of an RPC is empty for OK without metadata, else headed: status, details, trailing
    metadata. ABORT of an HTTP request drops its client.
    """

    SETTINGS = 16  # pickled: the first frame to a frontend
    HTTP_CALL = 17  # headed: the request's head, and the first piece of its body
    GRPC_CALL = 18  # headed: path and metadata, and the message of a unary RPC
    HEAD = 19  # headed: status and headers (HTTP), or initial metadata (gRPC)
    WHOLE = 20  # headed: the headers of an HTTP answer with status 200, and its body
    STOP_HTTP = 22  # stop accepting, drop connections after a number of milliseconds
    DROP_HALF = 23  # drop the connections with an incomplete request
    STOP_GRPC = 24  # refuse new RPCs
    CUT_OFF = 25  # drop all RPCs after a number of milliseconds
    WANTED = 26  # the server reads the rest of the request body
    LOG = 27  # pickled: new log settings
