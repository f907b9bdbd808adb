"""Copies of conversations between a router and a replica, in both directions."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from gateway.conversations.conversation import Shorten
from gateway.conversations.copies import ConversationCopy
from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.fleet.bulk import BulkConnection
from gateway.fleet.handshake import FleetKind
from gateway.fleet.large import Arrival
from gateway.fleet.offers import Key
from gateway.messages import SequenceTag
from gateway.models.model import Model
from gateway.processes.channel import LASTING_CALL, Frame, FrameKind, Receiver, number, read_number
from gateway.processes.inference_messages import LARGE_BYTES
from gateway.tensor import Buffer

log = logging.getLogger("sluice.fleet")

MOST_BYTES_UNDER_WAY = 32 << 20
"""Bytes of messages that one end of a connection has sent and the other has not taken."""

_write = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(ConversationCopy).decode


class CopyChannel(Receiver):
    """One end of the copies of a connection: a call that lasts as long as that.

    `on_copy` gets those that arrive, `on_idle` is called once all that were sent are taken. A copy
    beyond MOST_BYTES_UNDER_WAY is dropped, and makes the earlier ones void.
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
        self._arrivals: deque[Arrival[ConversationCopy]] = deque()
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
        for each in self._arrivals:
            each.discard()
        self._arrivals.clear()
        self._under_way = 0

    def _take(self, frame: Frame) -> None:
        if frame.kind == FrameKind.TAKEN:
            self._under_way = max(0, self._under_way - read_number(frame.payload))
            if not self._under_way:
                self._on_idle()
        elif frame.kind == FleetKind.COPY:
            self._pass_on(_read(frame.payload))
        elif frame.kind == FleetKind.LARGE_COPY:
            self._arrivals.append(Arrival(self._bulk, frame.payload, _read_large, self._look))
        elif frame.kind == FleetKind.TENSOR:
            waiting = [each for each in self._arrivals if not each.is_announced]
            if waiting:
                waiting[0].announce(frame.payload)
            else:
                self._bulk.hear(frame)

    def _look(self) -> None:
        """Pass on the large copies that have arrived, in their order."""
        while self._arrivals and self._arrivals[0].is_ready:
            try:
                self._pass_on(self._arrivals.popleft().take())
            except (msgspec.DecodeError, ValueError, InferenceError) as error:
                self._log(error)

    def _pass_on(self, copy: ConversationCopy) -> None:
        if copy.messages:
            taken = number(len(copy.messages))
            self._bulk.channel.send(FrameKind.TAKEN, LASTING_CALL, taken)
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

    def of(self, key: Key, sequence: SequenceTag) -> ConversationCopy | None:
        """The copy of a conversation after a turn; None for other sequences."""
        model = self._model(key)
        return None if model is None else self._dataplane.conversations.copy(model, sequence)

    def shortener(self, key: Key, sequence: SequenceTag) -> Shorten | None:
        """See `Conversations`."""
        model = self._model(key)
        return None if model is None else self._dataplane.conversations.shortener(model, sequence)

    def keep(self, copy: ConversationCopy) -> None:
        """Keep the copy of a conversation at another replica, if its model is hosted."""
        model = self._model((copy.model, copy.version))
        if model is not None:
            self._dataplane.conversations.keep(model, copy)

    def _model(self, key: Key) -> Model | None:
        try:
            return self._dataplane.model(key[0], str(key[1]))
        except InferenceError:  # it is not hosted
            return None


def void(copy: ConversationCopy) -> ConversationCopy:
    """The copy without messages, which makes the earlier ones void."""
    return msgspec.structs.replace(copy, messages=b"")


def _read_large(message: bytes, large: Sequence[Buffer]) -> ConversationCopy:
    return msgspec.structs.replace(_read(message), messages=bytes(large[0]))
