"""Where is the server, from what the user wrote?"""

import re

from gateway.tools.chat import grpc_server, http_server
from gateway.tools.chat.server import ChatError, ChatServer

SENDABLE = re.compile(r"[!-~]*")
"""Neither grpc nor HTTP takes other characters in a name, nor spaces."""
WITH_SCHEME = re.compile(r"https?://")
HOST_ONLY = re.compile(r"[^:/\[\]]+|\[[0-9a-fA-F:.]+\]")


async def connect(url: str, *, http: bool) -> ChatServer:
    """The server there, by the wire that is asked for; nothing is sent yet."""
    if not SENDABLE.fullmatch(url):
        raise ChatError(f"--url is {url!a}, expected HOST:PORT of plain letters, digits and signs")
    if http:
        return http_server.HttpServer(http_url(url))
    return grpc_server.GrpcServer(grpc_target(url))


def grpc_target(url: str) -> str:
    """HOST:PORT, with defaults for what is left out; ChatError for a URL of HTTP."""
    if WITH_SCHEME.match(url):
        raise ChatError(
            f"--url is '{url}', but gRPC is addressed as HOST:PORT, such as "
            f"localhost:{grpc_server.DEFAULT_PORT}; add --http to chat over HTTP"
        )
    return _with_port(url, grpc_server.DEFAULT_PORT)


def http_url(url: str) -> str:
    """A URL without a path, with defaults for what is left out."""
    scheme = WITH_SCHEME.match(url)
    if scheme:
        return url.rstrip("/")
    return f"http://{_with_port(url.rstrip('/'), http_server.DEFAULT_PORT)}"


def _with_port(place: str, port: int) -> str:
    place = place or "localhost"
    return f"{place}:{port}" if HOST_ONLY.fullmatch(place) else place
