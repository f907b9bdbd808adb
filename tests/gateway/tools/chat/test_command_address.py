"""Addresses of servers that the user may write."""

import pytest

from gateway.tools.chat.command import connect, grpc_target, http_url
from gateway.tools.chat.server import ChatError


@pytest.mark.parametrize(
    ("written", "target"),
    [
        ("", "localhost:8001"),
        ("host", "host:8001"),
        ("host:9", "host:9"),
        ("10.0.0.1", "10.0.0.1:8001"),
        ("[::1]", "[::1]:8001"),
        ("[::1]:9", "[::1]:9"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
        ("dns:///host:9", "dns:///host:9"),
    ],
)
def test_grpc_is_addressed_by_host_and_port(written: str, target: str) -> None:
    assert grpc_target(written) == target


@pytest.mark.parametrize("written", ["http://host:9", "https://host"])
def test_a_url_of_http_needs_the_flag(written: str) -> None:
    with pytest.raises(ChatError, match="add --http"):
        grpc_target(written)


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("", "http://localhost:8000"),
        ("host", "http://host:8000"),
        ("host:9/", "http://host:9"),
        ("http://host", "http://host"),
        ("https://host:9/", "https://host:9"),
    ],
)
def test_http_is_addressed_by_a_url_or_by_host_and_port(written: str, url: str) -> None:
    assert http_url(written) == url


@pytest.mark.parametrize("written", ["a b", "caf\xe9:1", "caf\udce9:1"])
@pytest.mark.parametrize("http", [True, False])
async def test_what_no_host_can_be_called_is_refused(written: str, http: bool) -> None:
    with pytest.raises(ChatError, match="expected HOST:PORT"):
        await connect(written, http=http)


async def test_a_name_that_cannot_be_looked_up_is_refused() -> None:
    server = await connect("http://a..b", http=True)
    with pytest.raises(ChatError, match="no name that a host can have"):
        await server.models()


@pytest.mark.parametrize("written", ["http://host:port", "host:port"])
async def test_a_port_that_is_none_is_refused(written: str) -> None:
    server = await connect(written, http=True)
    with pytest.raises(ChatError, match="expected http://HOST:PORT"):
        await server.models()
