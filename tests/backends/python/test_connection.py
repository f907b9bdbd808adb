"""Frames over a socket: whole, in order, and never in the event loop's way."""

import asyncio
import errno
import socket
from collections.abc import Iterator

import pytest

from backends.python import connection as module
from backends.python.connection import FrameSocket
from backends.python.worker.sluice_worker.protocol import PREFIX, FrameSplitter, frame
from tests.builders import settle, soon


class Ends:
    """A channel, what came over it, and the socket of the other end."""

    def __init__(self) -> None:
        mine, self.other = socket.socketpair()
        self.frames: list[tuple[bytes, bytes]] = []
        self.reads = 0
        self.is_scarce = False
        self.broken: list[str] = []
        self.changed = asyncio.Event()
        self.channel = FrameSocket(mine, self._take, self._lose)
        self.channel.on_read = self._read

    def _take(self, header: bytes, body: memoryview) -> None:
        if header == b"nonsense":
            raise ValueError(header)
        if header == b"large" and self.is_scarce:
            self.changed.set()
            raise OSError(errno.EMFILE, "Too many open files")
        self.frames.append((header, bytes(body)))

    def _read(self) -> None:
        self.reads += 1
        self.changed.set()

    def _lose(self, reason: str) -> None:
        self.broken.append(reason)
        self.changed.set()

    async def change(self) -> None:
        await soon(self.changed.wait())
        self.changed.clear()

    async def receive(self, size: int) -> bytes:
        """The messages that the channel has sent, as the other end reads them."""
        self.other.setblocking(False)
        loop, found = asyncio.get_running_loop(), b""
        while len(found) < size:
            found += await soon(loop.sock_recv(self.other, 1 << 20))
        return found


@pytest.fixture
async def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.channel.close()
    found.other.close()


async def test_frames_of_one_read_are_reported_together(ends: Ends) -> None:
    ends.other.sendall(frame(b"one", [b"a", b"b"]) + frame(b"two"))
    await ends.change()
    assert ends.frames == [(b"one", b"ab"), (b"two", b"")]
    assert ends.reads == 1


async def test_a_frame_may_come_in_pieces(ends: Ends) -> None:
    data = frame(b"header", [b"body"])
    for each in data[:-1]:
        ends.other.send(bytes([each]))
        await ends.change()
    assert ends.frames == []
    ends.other.send(data[-1:])
    await ends.change()
    assert ends.frames == [(b"header", b"body")]


async def test_a_message_arrives_as_a_frame(ends: Ends) -> None:
    ends.channel.send(b"header", [memoryview(b"bo"), b"dy"])
    data = await ends.receive(len(frame(b"header", [b"body"])))
    assert [(h, bytes(b)) for h, b in FrameSplitter().feed(data)] == [(b"header", b"body")]


async def test_a_full_socket_delays_frames_and_drops_none(ends: Ends) -> None:
    frames = [frame(str(number).encode(), [bytes(100_000)]) for number in range(100)]
    for number in range(100):
        ends.channel.send(str(number).encode(), [bytes(100_000)])
    assert await ends.receive(sum(map(len, frames))) == b"".join(frames)


async def test_there_is_room_again_once_the_other_end_has_read(ends: Ends) -> None:
    ends.channel.send(b"much", [bytes(4 << 20)])
    waiting = asyncio.ensure_future(ends.channel.room())
    await settle()
    assert not waiting.done()
    await ends.receive(4 << 20)
    await soon(waiting)


async def test_waiters_for_room_return_when_the_socket_closes(ends: Ends) -> None:
    ends.channel.send(b"much", [bytes(4 << 20)])
    waiting = asyncio.ensure_future(ends.channel.room())
    await settle()
    ends.channel.close()
    await soon(waiting)


async def test_a_worker_that_reads_nothing_is_killed_before_it_fills_the_memory(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNSENT_BYTES", 1 << 20)
    ends.channel.send(b"much", [bytes(4 << 20)])
    assert ends.broken == [f"it left more than {1 << 20} bytes unread"]


async def test_the_end_of_the_worker_is_reported_once(ends: Ends) -> None:
    ends.other.close()
    await ends.change()
    ends.channel.read_rest()
    assert ends.broken == ["it closed its connection"]


@pytest.mark.parametrize(
    "data", [frame(b"nonsense"), PREFIX.pack(1 << 31, 0), PREFIX.pack(0, 1 << 50)]
)
async def test_an_invalid_message_breaks_the_socket(ends: Ends, data: bytes) -> None:
    ends.other.sendall(data + frame(b"later"))
    await ends.change()
    assert "it sent what cannot be understood" in ends.broken[0]
    assert ends.frames == []


async def test_a_paused_socket_reads_nothing_until_it_is_resumed(ends: Ends) -> None:
    ends.channel.pause()
    ends.other.sendall(frame(b"one"))
    await settle()
    assert ends.frames == []
    ends.channel.resume()
    await ends.change()
    assert ends.frames == [(b"one", b"")]


async def test_the_rest_is_read_before_the_loop_has_read_any(ends: Ends) -> None:
    ends.channel.pause()
    ends.other.sendall(frame(b"last words"))
    ends.other.close()
    ends.channel.read_rest()
    assert ends.frames == [(b"last words", b"")]
    assert ends.broken == ["it closed its connection"]


@pytest.mark.parametrize("is_scarce", [False, True])
async def test_a_frame_that_waits_for_a_descriptor_is_part_of_the_rest(
    ends: Ends, is_scarce: bool
) -> None:
    ends.is_scarce = True
    ends.other.sendall(frame(b"one") + frame(b"large", [b"body"]) + frame(b"two"))
    await ends.change()
    assert ends.frames == [(b"one", b"")]
    ends.other.sendall(frame(b"three"))
    ends.other.close()
    ends.is_scarce = is_scarce
    ends.channel.read_rest()
    rest = [(b"large", b"body"), (b"two", b""), (b"three", b"")]
    assert ends.frames == [(b"one", b""), *([] if is_scarce else rest)]
    assert ends.broken == ([] if is_scarce else ["it closed its connection"])


async def test_sending_to_a_closed_socket_has_no_effect(ends: Ends) -> None:
    ends.other.close()
    ends.channel.send(b"hello")
    ends.channel.close()
    ends.channel.close()
    ends.channel.send(b"hello")


async def test_waiters_for_room_continue_one_after_the_other(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FULL_BYTES", 10)
    ends.channel.send(b"much", [bytes(4 << 20)])
    sent: list[int] = []

    async def send(number: int) -> None:
        await ends.channel.room()
        sent.append(number)
        ends.channel.send(b"more", [bytes(100)])

    sending = [asyncio.ensure_future(send(number)) for number in range(20)]
    await settle()
    assert sent == []
    sending[3].cancel()
    ends.other.settimeout(10)
    async with asyncio.timeout(10):
        while not all(each.done() for each in sending):
            await asyncio.to_thread(ends.other.recv, 1 << 20)
            await settle()
    assert sent == [number for number in range(20) if number != 3]
