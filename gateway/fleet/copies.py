"""Copies of conversations between a router and a replica, in both directions."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from gateway.conversations.conversation import Shorten
from gateway.conversations.copies import ConversationCopy
from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.fleet.bulk import BulkConnection
from gateway.fleet.handshake import FleetKind
from gateway.fleet.large import Arrival, split
from gateway.messages import SequenceTag
from gateway.models.model import Model
from gateway.processes.channel import (
    LASTING_CALL,
    LENGTH,
    Frame,
    FrameKind,
    Receiver,
    number,
    read_number,
)
from gateway.processes.inference_messages import LARGE_BYTES
from gateway.tensor import Buffer

log = logging.getLogger("sluice.fleet")

MOST_BYTES_UNDER_WAY = 32 << 20
"""Bytes of messages that one end of a connection has sent and the other has not taken."""

_write = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(ConversationCopy).decode


class _LargeCopy:
    """A large copy that arrives: its head, and whether a later one of its conversation is here."""

    def __init__(self, head: ConversationCopy, arrival: Arrival[ConversationCopy]) -> None:
        self.head = head
        self.arrival = arrival
        self.is_old = False


class CopyChannel(Receiver):
    """One end of the copies of a connection: a call that lasts as long as that.

    `on_copy` gets those that arrive, without those that a later one has overtaken, `on_idle` is
    called once all that were sent are taken. A copy beyond MOST_BYTES_UNDER_WAY is dropped, and
    makes the earlier ones void.
    """

    def __init__(
        self,
        bulk: BulkConnection,
        on_copy: Callable[[ConversationCopy], None],
        on_idle: Callable[[], None],
    ) -> None:
        self._bulk = bulk
        self._on_copy = on_copy
        self._on_idle = on_idle
        self._arriving: deque[_LargeCopy] = deque()
        self._under_way = 0
        self._has_logged = False
        bulk.channel.join(LASTING_CALL, self)

    @property
    def is_idle(self) -> bool:
        """Whether all copies that were sent are taken."""
        return not self._under_way

    def send(self, copy: ConversationCopy) -> bool:
        """Send a copy; False if too many bytes are under way. Dropped after a disconnect."""
        if self._bulk.is_ended or self._bulk.channel.is_lost:
            return True
        if self._under_way + len(copy.messages) > MOST_BYTES_UNDER_WAY:
            self.send(void(copy))
            return False
        self._under_way += len(copy.messages)
        if len(copy.messages) > LARGE_BYTES:
            payload = number(1) + _write(void(copy))
            self._bulk.channel.send(FleetKind.LARGE_COPY, LASTING_CALL, payload)
            self._bulk.send(LASTING_CALL, memoryview(copy.messages))
        else:
            self._bulk.channel.send(FleetKind.COPY, LASTING_CALL, _write(copy))
        return True

    def hear(self, frame: Frame) -> None:
        try:
            self._take(frame)
        except (msgspec.DecodeError, ValueError, InferenceError) as error:
            self._log(error)

    def lose(self) -> None:
        for each in self._arriving:
            each.arrival.discard()
        self._arriving.clear()
        self._under_way = 0

    def _take(self, frame: Frame) -> None:
        if frame.kind == FrameKind.TAKEN:
            self._under_way = max(0, self._under_way - read_number(frame.payload))
            if not self._under_way:
                self._on_idle()
        elif frame.kind == FleetKind.COPY:
            self._overtake(copy := _read(frame.payload))
            self._pass_on(copy)
        elif frame.kind == FleetKind.LARGE_COPY:
            self._overtake(head := _read(split(frame.payload)[1]))
            arrival = Arrival(self._bulk, frame.payload, _read_large, self._look)
            self._arriving.append(_LargeCopy(head, arrival))
        elif frame.kind == FleetKind.TENSOR:
            arrivals = [each.arrival for each in self._arriving]
            waiting = [each for each in arrivals if not each.is_announced]
            if waiting:
                waiting[0].announce(frame.payload)
            else:
                self._bulk.hear(frame)

    def _look(self) -> None:
        """Pass on the large copies that have arrived, in their order."""
        while self._arriving and self._arriving[0].arrival.is_ready:
            found = self._arriving.popleft()
            try:
                self._pass_on(found.arrival.take(), is_old=found.is_old)
            except (msgspec.DecodeError, ValueError, InferenceError) as error:
                self._log(error)

    def _overtake(self, copy: ConversationCopy) -> None:
        """Have the large copies of the conversation that are still arriving dropped."""
        for each in self._arriving:
            each.is_old = each.is_old or each.head.identity == copy.identity

    def _pass_on(self, copy: ConversationCopy, *, is_old: bool = False) -> None:
        if copy.messages:
            taken = number(len(copy.messages))
            self._bulk.channel.send(FrameKind.TAKEN, LASTING_CALL, taken)
        if not is_old:
            self._on_copy(copy)

    def _log(self, error: Exception) -> None:
        if not self._has_logged:
            self._has_logged = True
            log.warning("copy of a conversation dropped", extra={"reason": str(error)})


class ReplicaCopies:
    """The conversations of a replica: copies of its own, and those that it keeps for others.

    `dropped` are its own that were not sent, because too many bytes were under way.
    """

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self.dropped = 0

    def turn(self, model: Model, sequence: SequenceTag) -> "CopiedTurn":
        """The turn that a model has just accepted."""
        conversations = self._dataplane.conversations
        found = conversations.find(model, sequence)
        if found is None:  # it has ended already, or is none
            return CopiedTurn(partial(conversations.copy, model, sequence), None)
        return CopiedTurn(found.copied, found.shortener())

    def keep(self, copy: ConversationCopy) -> None:
        """Keep the copy of a conversation at another replica, if its model is hosted."""
        with suppress(InferenceError):  # it is not hosted
            model = self._dataplane.model(copy.model, str(copy.version))
            self._dataplane.conversations.keep(model, copy)


class CopiedTurn:
    """A turn of a conversation at a replica, which is copied once its router has left it.

    `copy` makes the copy, also if the conversation has moved to another version by then.
    """

    def __init__(
        self, copy: Callable[[], ConversationCopy | None], shorten: Shorten | None
    ) -> None:
        self._copy = copy
        self._shorten = shorten
        self._is_copied = False

    def settle(self, passed_on: bytes, send: Callable[[ConversationCopy], bool]) -> bool:
        """Send the copy after the turn, whose answer is cut by the payload of GONE.

        Only one that is cut follows an earlier one. False if it was not sent, for lack of room.
        """
        is_cut = False
        if self._shorten is not None and len(passed_on) == LENGTH.size:
            is_cut = self._shorten(read_number(passed_on))
        if self._is_copied and not is_cut:
            return True
        copy = self._copy()
        self._is_copied = copy is None or send(copy)
        return self._is_copied


def void(copy: ConversationCopy) -> ConversationCopy:
    """The copy without messages, which makes the earlier ones void."""
    return msgspec.structs.replace(copy, messages=b"")


def _read_large(message: bytes, large: Sequence[Buffer]) -> ConversationCopy:
    return msgspec.structs.replace(_read(message), messages=bytes(large[0]))
