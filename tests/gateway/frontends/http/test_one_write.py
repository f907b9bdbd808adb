import asyncio
from typing import cast

import pytest

from gateway.frontends.http.one_write import OneWrite


class Writes:
    """What a transport was given, call by call."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.calls.append(bytes(data))

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.calls.append(b"".join(parts))

    def is_closing(self) -> bool:
        return True


@pytest.fixture
def writes() -> Writes:
    return Writes()


@pytest.fixture
def transport(writes: Writes) -> OneWrite:
    return OneWrite(cast(asyncio.Transport, writes))


def test_what_is_held_goes_out_with_what_is_written_next(
    transport: OneWrite, writes: Writes
) -> None:
    transport.hold()
    transport.write(b"head ")
    assert writes.calls == []
    transport.write(b"body")
    transport.write(b"more")
    assert writes.calls == [b"head body", b"more"]


def test_without_a_hold_everything_is_written_at_once(transport: OneWrite, writes: Writes) -> None:
    transport.write(b"head")
    transport.write(b"body")
    assert writes.calls == [b"head", b"body"]


def test_all_else_is_the_transports_own(transport: OneWrite) -> None:
    assert transport.is_closing()
