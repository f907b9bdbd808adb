"""How what stands before a body is written in JSON: names and values of headers, as text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.types import Scope

from gateway.frontends.http.asgi_extensions import HEADER_NAMES
from gateway.processes.channel import FrameKind

Pairs = Sequence[Sequence[str]]


def text_pairs(headers: Iterable[tuple[bytes, bytes]]) -> Pairs:
    """Headers of HTTP; each byte becomes a character."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def byte_pairs(pairs: Pairs) -> list[tuple[bytes, bytes]]:
    """The same headers again."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]


def writable(text: str) -> str:
    """A text without what is no character, as a name of a file may have it."""
    return text.encode("utf-8", "replace").decode()


def written(metadata: Iterable[tuple[str, str | bytes]]) -> Pairs:
    """Metadata of gRPC; of values that are bytes each byte becomes a character."""
    return [
        (name, writable(value) if isinstance(value, str) else value.decode("latin-1"))
        for name, value in metadata
    ]


def read(pairs: Pairs) -> list[tuple[str, str | bytes]]:
    """The same metadata again: values are bytes where the name ends in `-bin`."""
    return [
        (name, value.encode("latin-1") if name.endswith("-bin") else value) for name, value in pairs
    ]


AS_IS = ("http_version", "method", "scheme", "path", "root_path", "client", "server")
AS_TEXT = ("raw_path", "query_string")


def written_scope(scope: Scope, *, whole: bool) -> Mapping[str, Any]:
    """The head as JSON; `whole` says that the piece of the body that goes with it is all of it."""
    found = {name: scope[name] for name in AS_IS}
    found |= {name: scope[name].decode("latin-1") for name in AS_TEXT}
    found["headers"] = text_pairs(scope["headers"])
    found["names"] = [name.decode("latin-1") for name in scope["state"][HEADER_NAMES]]
    found["whole"] = whole
    return found


def read_scope(head: Mapping[str, Any], state: dict[str, Any]) -> Scope:
    """The scope again, with another `state`; the names as the client wrote them are added to it."""
    found: dict[str, Any] = {name: head[name] for name in AS_IS}
    found |= {name: head[name].encode("latin-1") for name in AS_TEXT}
    for address in ("client", "server"):
        found[address] = None if found[address] is None else tuple(found[address])
    names = [name.encode("latin-1") for name in head["names"]]
    return found | {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "headers": byte_pairs(head["headers"]),
        "state": {**state, HEADER_NAMES: names},
    }


class FrontendKind(FrameKind):
    """Of an answer of gRPC, END is headed: status, details, trailing metadata.

    An answer of HTTP that is aborted drops its client.
    """

    SETTINGS = 16  # headed; to a frontend, first of all
    HTTP_CALL = 17  # headed: the request's head, and the first piece of its body
    GRPC_CALL = 18  # headed: path and metadata, and the message if only one comes
    HEAD = 19  # headed: the answer's head, initial metadata
    WHOLE = 20  # headed: an HTTP answer with status 200, and its body
    STOP_HTTP = 22  # accept nothing more, and drop all in so many milliseconds: a number
    DROP_HALF = 23  # drop those of whose request only a part has come
    STOP_GRPC = 24  # take no more RPCs
    CUT_OFF = 25  # drop all RPCs in so many milliseconds: a number
    WANTED = 26  # the rest of a request's body is wanted
    LOG = 27  # headed: how to log from now on
