"""The writes of a channel: those of one read, and those of a lone call."""

from typing import Any

from gateway.event_loop import WRITES
from gateway.processes.channel import LASTING_CALL, Channel, Frame, FrameKind, Receiver, packed
from tests.builders import settle


class Silent(Receiver):
    """Does nothing."""

    def hear(self, frame: Frame) -> None:
        """Nothing."""

    def lose(self) -> None:
        """Nothing."""


class Answering(Silent):
    """Sends a frame for each that it receives, and has a client to write to."""

    def __init__(self, channel: Channel, client: Any) -> None:
        self._channel = channel
        self._client = client

    def hear(self, frame: Frame) -> None:
        assert WRITES.collected is not None
        WRITES.collected.append((self._client, frame.payload))
        self._channel.send(FrameKind.DATA, frame.call, frame.payload)
        assert self._client.log == []


class Written:
    """A transport that notes its writes in a log."""

    def __init__(self, log: list[bytes]) -> None:
        self.log = log

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.log.append(data)


async def test_answers_to_the_frames_of_one_read_are_one_write_behind_those_to_clients() -> None:
    log: list[bytes] = []
    channel = Channel(lambda frame: None)
    channel.connection_made(Written(log))
    for call in (1, 2):
        channel.join(call, Answering(channel, Written(log)))
    frames = [packed(FrameKind.DATA, call, b"%d" % call) for call in (1, 2)]
    channel.data_received(b"".join(frames))
    assert log == [b"1", b"2", b"".join(frames)]
    await settle()
    assert len(log) == 3


async def test_the_first_frame_of_a_lone_call_is_written_at_once() -> None:
    log: list[bytes] = []
    channel = Channel(lambda frame: None)
    channel.connection_made(Written(log))
    channel.join(LASTING_CALL, Silent())
    frames = [packed(FrameKind.DATA, call, b"%d" % call) for call in range(1, 5)]
    channel.send_first(FrameKind.DATA, 1, b"1")
    assert log == frames[:1]
    channel.send(FrameKind.DATA, 2, b"2")
    channel.send_first(FrameKind.DATA, 3, b"3")
    assert log == frames[:1], "an earlier frame is not written yet"
    await settle()
    channel.join(3, Silent())
    channel.send_first(FrameKind.DATA, 4, b"4")
    assert log == [frames[0], frames[1] + frames[2]], "another call is under way"
    await settle()
    assert b"".join(log) == b"".join(frames)


async def test_the_only_frame_of_a_read_needs_no_batch_of_writes() -> None:
    batched: list[bool] = []

    class Noting(Silent):
        def hear(self, frame: Frame) -> None:
            batched.append(WRITES.collected is not None)

    channel, frame = Channel(lambda frame: None), packed(FrameKind.DATA, 1, b"text")
    channel.join(1, Noting())
    for data in (frame, frame[:5], frame[5:], frame + frame[:12], frame[12:], frame):
        channel.data_received(data)
    assert batched == [False, True, True, True, False]
