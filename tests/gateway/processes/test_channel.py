"""Channels over a socket pair: delivery, disconnects and failing calls."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from gateway.processes.channel import (
    NO_CALL,
    Channel,
    Frame,
    FrameKind,
    Receiver,
)
from tests.builders import settle, soon


class Ear(Receiver):
    """Stores the received frames."""

    def __init__(self) -> None:
        self.heard: list[Frame] = []
        self.losses = 0

    def hear(self, frame: Frame) -> None:
        self.heard.append(frame)

    def lose(self) -> None:
        self.losses += 1


@dataclass
class End:
    """One end, and the frames without a receiver there."""

    channel: Channel
    strays: asyncio.Queue[Frame] = field(default_factory=asyncio.Queue)

    async def stray(self) -> Frame:
        """The next of them."""
        return await soon(self.strays.get())


@dataclass
class Ends:
    """Both."""

    one: End
    other: End


async def end_of(connection: socket.socket) -> End:
    strays: asyncio.Queue[Frame] = asyncio.Queue()
    _, channel = await asyncio.get_running_loop().create_unix_connection(
        lambda: Channel(strays.put_nowait), sock=connection
    )
    return End(channel, strays)


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    one, other = socket.socketpair()
    found = Ends(await end_of(one), await end_of(other))
    yield found
    for end in (found.one, found.other):
        end.channel.close()
        await soon(end.channel.lost())


async def test_frames_of_one_turn_arrive_in_their_order(ends: Ends) -> None:
    sent = [Frame(FrameKind.DATA, call, b"%d" % call) for call in (3, 1, 2, 1, NO_CALL)]
    for frame in sent:
        ends.one.channel.send(frame.kind, frame.call, frame.payload)
    assert [await ends.other.stray() for _ in sent] == sent


async def test_frames_of_many_turns_arrive_in_their_order(ends: Ends) -> None:
    for call in range(1, 50):
        ends.one.channel.send(FrameKind.DATA, call, bytes(call * 1000))
        if call % 7 == 0:
            await settle()
    found = [await ends.other.stray() for _ in range(1, 50)]
    assert [(frame.call, len(frame.payload)) for frame in found] == [
        (call, call * 1000) for call in range(1, 50)
    ]


async def test_frames_of_one_turn_are_one_write() -> None:
    class Connection(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.writes: list[object] = []

        def write(self, data: object) -> None:
            self.writes.append(data)

        def is_closing(self) -> bool:
            return False

    connection, channel = Connection(), Channel(lambda _: None)
    channel.connection_made(connection)
    channel.send(FrameKind.DATA, 1, b"one")
    channel.send(FrameKind.END, 1)
    assert connection.writes == []
    await settle()
    assert len(connection.writes) == 1
    channel.send(FrameKind.DATA, 2, b"two")
    await settle()
    assert len(connection.writes) == 2


async def test_large_frames_cross_in_both_directions(ends: Ends) -> None:
    large = bytes(4 << 20)
    ends.one.channel.send(FrameKind.DATA, 1, large)
    ends.other.channel.send(FrameKind.DATA, 2, large)
    assert await ends.other.stray() == (FrameKind.DATA, 1, large)
    assert await ends.one.stray() == (FrameKind.DATA, 2, large)


async def test_a_receiver_gets_the_frames_of_its_call_only(ends: Ends) -> None:
    one, two = Ear(), Ear()
    ends.other.channel.join(1, one)
    ends.other.channel.join(2, two)
    for call in (1, 2, 3, 1):
        ends.one.channel.send(FrameKind.DATA, call)
    ends.one.channel.send(FrameKind.END, NO_CALL)
    assert [(await ends.other.stray()).call for _ in range(2)] == [3, NO_CALL]
    assert [frame.call for frame in one.heard] == [1, 1]
    assert [frame.call for frame in two.heard] == [2]


async def test_frames_of_a_removed_receiver_go_to_the_channel(ends: Ends) -> None:
    ear = Ear()
    ends.other.channel.join(1, ear)
    ends.other.channel.leave(1)
    ends.other.channel.leave(1)
    ends.one.channel.send(FrameKind.DATA, 1, b"late")
    assert await ends.other.stray() == (FrameKind.DATA, 1, b"late")
    assert ear.heard == []


async def test_a_frame_may_add_and_remove_receivers(ends: Ends) -> None:
    class Leaving(Ear):
        def hear(self, frame: Frame) -> None:
            super().hear(frame)
            ends.other.channel.leave(frame.call)

    ear = Leaving()
    ends.other.channel.join(1, ear)
    for payload in (b"heard", b"late"):
        ends.one.channel.send(FrameKind.DATA, 1, payload)
    assert (await ends.other.stray()).payload == b"late"
    assert [frame.payload for frame in ear.heard] == [b"heard"]


async def test_every_receiver_is_notified_once_of_a_disconnect(ends: Ends) -> None:
    ears = [Ear(), Ear()]
    for call, ear in enumerate(ears, 1):
        ends.other.channel.join(call, ear)
    assert not ends.other.channel.is_lost
    ends.one.channel.close()
    await soon(ends.other.channel.lost())
    assert ends.other.channel.is_lost
    assert [ear.losses for ear in ears] == [1, 1]


async def test_a_receiver_removed_at_a_disconnect_does_not_affect_others(
    ends: Ends,
) -> None:
    class Leaving(Ear):
        def lose(self) -> None:
            super().lose()
            ends.other.channel.leave(1)
            ends.other.channel.leave(2)

    ears = [Leaving(), Leaving()]
    for call, ear in enumerate(ears, 1):
        ends.other.channel.join(call, ear)
    ends.one.channel.close()
    await soon(ends.other.channel.lost())
    assert [ear.losses for ear in ears] == [1, 1]


async def test_a_receiver_registered_after_a_disconnect_is_notified_immediately(ends: Ends) -> None:
    ends.one.channel.close()
    await soon(ends.other.channel.lost())
    ear = Ear()
    ends.other.channel.join(1, ear)
    assert ear.losses == 1


async def test_frames_sent_directly_before_closing_arrive(ends: Ends) -> None:
    ends.one.channel.send(FrameKind.DATA, 1, bytes(1 << 20))
    ends.one.channel.close()
    assert len((await ends.other.stray()).payload) == 1 << 20
    await soon(ends.other.channel.lost())


async def test_frames_sent_after_a_disconnect_are_dropped(ends: Ends) -> None:
    ends.one.channel.close()
    await soon(ends.other.channel.lost())
    for end in (ends.one, ends.other):
        end.channel.send(FrameKind.DATA, 1, b"nobody")
        end.channel.close()
    await settle()
    assert ends.one.strays.empty()
    assert ends.other.strays.empty()


class Failing(Ear):
    """Fails at the first frame that it receives."""

    def hear(self, frame: Frame) -> None:
        super().hear(frame)
        if len(self.heard) == 1:
            raise LookupError("a defect")


async def test_a_frame_that_a_call_cannot_handle_ends_the_call_on_both_sides(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    broken, asking, neighbour = Failing(), Ear(), Ear()
    ends.other.channel.join(1, broken)
    ends.other.channel.join(2, neighbour)
    ends.one.channel.join(1, asking)
    for call in (1, 2, 1, 2, 3):
        ends.one.channel.send(FrameKind.DATA, call, b"%d" % call)
    assert [(await ends.other.stray()).call for _ in range(2)] == [1, 3]
    ends.other.channel.send(FrameKind.PONG)
    await ends.one.stray()
    assert [frame.kind for frame in broken.heard] == [FrameKind.DATA, FrameKind.ABORT]
    assert [frame.kind for frame in asking.heard] == [FrameKind.ABORT]
    assert [frame.kind for frame in neighbour.heard] == [FrameKind.DATA, FrameKind.DATA]
    [record] = caplog.records
    assert (record.getMessage(), record.exc_info is None) == ("frame not handled", False)


async def test_an_abort_that_crosses_another_is_not_answered(ends: Ends) -> None:
    ours, theirs = Failing(), Failing()
    ends.one.channel.join(1, ours)
    ends.other.channel.join(1, theirs)
    for end in (ends.one, ends.other):
        end.channel.send(FrameKind.DATA, 1)
    for end in (ends.one, ends.other):
        assert await end.stray() == (FrameKind.ABORT, 1, b"")
    for end in (ends.one, ends.other):
        end.channel.send(FrameKind.PING)
    for end in (ends.one, ends.other):
        assert (await end.stray()).kind == FrameKind.PING, "no ABORT came before"
    for each in (ours, theirs):
        assert [frame.kind for frame in each.heard] == [FrameKind.DATA, FrameKind.ABORT]


async def test_a_call_that_fails_at_an_abort_too_is_logged_and_aborted_once(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Ear):
        def hear(self, frame: Frame) -> None:
            super().hear(frame)
            raise LookupError("a defect")

    broken, also_broken, neighbour = Broken(), Broken(), Ear()
    for call, ear in ((1, broken), (2, also_broken), (3, neighbour)):
        ends.other.channel.join(call, ear)
    for kind, call in (
        (FrameKind.DATA, 1),
        (FrameKind.ABORT, 2),
        (FrameKind.DATA, 3),
        (FrameKind.ABORT, 1),
    ):
        ends.one.channel.send(kind, call)
    assert await ends.other.stray() == (FrameKind.ABORT, 1, b"")
    ends.other.channel.send(FrameKind.PONG)
    assert [await ends.one.stray() for _ in range(2)] == [
        (FrameKind.ABORT, 1, b""),
        (FrameKind.PONG, 0, b""),
    ]
    assert [frame.kind for frame in broken.heard] == [FrameKind.DATA, FrameKind.ABORT]
    assert [frame.kind for frame in also_broken.heard] == [FrameKind.ABORT]
    assert [frame.kind for frame in neighbour.heard] == [FrameKind.DATA]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["frame not handled", "call not ended", "frame not handled"]


async def test_a_call_that_cannot_start_is_aborted_at_the_caller() -> None:
    def refuse(frame: Frame) -> None:
        heard.append(frame)
        raise LookupError("a defect")

    heard: list[Frame] = []
    ours, theirs = socket.socketpair()
    one, loop = await end_of(ours), asyncio.get_running_loop()
    _, other = await loop.create_unix_connection(lambda: Channel(refuse), sock=theirs)
    asking = Ear()
    one.channel.join(1, asking)
    for call in (1, NO_CALL, 2):
        one.channel.send(FrameKind.DATA, call)
    assert await one.stray() == (FrameKind.ABORT, 2, b"")
    assert asking.heard == [Frame(FrameKind.ABORT, 1, b"")]
    one.channel.send(FrameKind.ABORT, 1)  # no ABORT answers an ABORT
    one.channel.send(FrameKind.DATA, 3)
    assert await one.stray() == (FrameKind.ABORT, 3, b"")
    assert [frame.call for frame in heard] == [1, NO_CALL, 2, 1, 3]
    one.channel.close()
    await soon(other.lost())


async def test_frames_of_a_turn_are_made_before_its_write(ends: Ends) -> None:
    made: list[str] = []

    def send() -> None:
        made.append("now")
        ends.one.channel.send(16, payload=b"last")

    ends.one.channel.before_write(send)
    ends.one.channel.send(16, payload=b"first")
    assert made == []
    assert [(await ends.other.stray()).payload for _ in range(2)] == [b"first", b"last"]
    ends.one.channel.send(16, payload=b"next")
    assert (await ends.other.stray()).payload == b"next"
    assert made == ["now"]


async def test_a_call_that_fails_before_a_write_stops_no_other_one(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    channel = ends.one.channel

    def fail() -> None:
        channel.before_write(lambda: channel.send(16, payload=b"later"))
        raise LookupError("a defect")

    channel.before_write(fail)
    channel.before_write(lambda: channel.send(16, payload=b"other"))
    assert [(await ends.other.stray()).payload for _ in range(2)] == [b"other", b"later"]
    channel.send(16, payload=b"next")
    assert (await ends.other.stray()).payload == b"next"
    assert caplog.messages == ["frames not sent"]


async def test_closing_makes_the_frames_that_are_due(ends: Ends) -> None:
    ends.one.channel.before_write(lambda: ends.one.channel.send(16, payload=b"due"))
    ends.one.channel.close()
    assert (await ends.other.stray()).payload == b"due"
