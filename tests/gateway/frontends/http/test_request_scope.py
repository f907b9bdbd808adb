"""Extensions of ASGI, and their substitutes without a connection."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Scope

from gateway.errors import Code, InferenceError
from gateway.frontends.http.request_scope import (
    SEND_PIECE,
    WATCH,
    OnDisconnect,
    piece_sender,
    send_apart,
)


class Connection:
    """Records the functions that it should call when its client disconnects."""

    def __init__(self) -> None:
        self.watched: list[Callable[[], None] | None] = []

    @property
    def scope(self) -> Scope:
        return {"type": "http", "state": {WATCH: self.watched.append}}


def test_the_connection_reports_that_the_client_has_disconnected() -> None:
    connection, left = Connection(), asyncio.Event()
    with OnDisconnect(connection.scope, left.set):
        (leave,) = connection.watched
        assert leave is not None
        leave()
    assert left.is_set()
    assert connection.watched[1:] == [None]


def test_the_connection_reports_nothing_to_a_request_that_has_failed() -> None:
    connection = Connection()

    def fail() -> None:
        with OnDisconnect(connection.scope, lambda: None):
            raise InferenceError(Code.INTERNAL, "failed")

    with pytest.raises(InferenceError):
        fail()
    assert connection.watched[1:] == [None]


@pytest.mark.parametrize("scope", [{"type": "http"}, {"type": "http", "state": {}}])
def test_without_a_connection_no_disconnect_is_reported(scope: Scope) -> None:
    with OnDisconnect(scope, lambda: None):
        pass


@pytest.mark.parametrize("scope", [{"type": "http"}, {"type": "http", "state": {}}])
async def test_without_a_connection_pieces_are_messages_of_asgi(scope: Scope) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await piece_sender(scope, send)(b"piece")
    assert sent == [{"type": "http.response.body", "body": b"piece", "more_body": True}]


def test_pieces_go_to_the_connection_that_takes_them() -> None:
    async def piece(data: bytes) -> None: ...

    async def send(message: Message) -> None: ...

    assert piece_sender({"state": {SEND_PIECE: piece}}, send) is piece


async def test_a_whole_response_is_one_head_and_a_message_for_each_part() -> None:
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-length", b"3")]
    await send_apart(send, headers, (b"a", b"bc"))
    assert sent == [
        {"type": "http.response.start", "status": 200, "headers": headers},
        {"type": "http.response.body", "body": b"a", "more_body": True},
        {"type": "http.response.body", "body": b"bc"},
    ]
