"""The worker's ends of the sockets: frames from and to the gateway."""

import json
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from .protocol import ToGateway, frame
from .segments import IncomingSegments, OutgoingSegments

Buffer = bytes | memoryview
RECEIVE_BYTES = 1 << 16
"""Bytes read at once; larger blocks would be mapped and unmapped for each message."""
encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class GatewayConnection:
    """Sockets and segments to the gateway; a process without its gateway ends at once."""

    def __init__(
        self, work: socket.socket, control: socket.socket, descriptors: socket.socket
    ) -> None:
        self.outgoing = OutgoingSegments(descriptors)
        self.incoming = IncomingSegments(descriptors)
        self._sockets = (work, control, descriptors)
        self._work, self._control = work, control
        self._work_lock, self._control_lock = threading.Lock(), threading.Lock()
        self._late: deque[bytes] = deque()
        # A process that model.py forks must not keep the sockets open after this one ends.
        os.register_at_fork(after_in_child=self._close)

    def receive_work(self) -> bytes:
        """The next bytes over `work`; none if the gateway has closed it."""
        return _receive(self._work)

    def receive_work_now(self) -> bytes | None:
        """Bytes that have arrived over `work`; None if there are none now."""
        try:
            return self._work.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def receive_control(self) -> bytes:
        """The next bytes over `control`; none if the gateway has closed it."""
        return _receive(self._control)

    def send(self, header: Sequence[Any], buffers: Sequence[Buffer] = ()) -> None:
        """Send one message over `work`, and the segments released since the last one."""
        data = frame(encode(header).encode(errors="replace"), buffers)
        if released := self._released():
            data = released + data
        with self._work_lock:
            _send(self._work, data)
        if self._late:
            self._send_late()

    def send_control(self, header: Sequence[Any]) -> None:
        """Send one message over `control`."""
        data = frame(encode(header).encode())
        with self._control_lock:
            _send(self._control, data)

    def send_from_finalizer(self, header: Sequence[Any]) -> None:
        """Send over `work` from a `__del__`, which may run while this thread is sending."""
        self._late.append(frame(encode(header).encode(errors="replace")))
        self._send_late()

    def send_released(self) -> None:
        """Send the released segments, if any, over `control`; `work` may be full."""
        if released := self._released():
            with self._control_lock:
                _send(self._control, released)

    def _released(self) -> bytes:
        freed, dropped = self.incoming.take_released(), self.outgoing.take_dropped()
        if not freed and not dropped:
            return b""
        return frame(encode([ToGateway.RELEASED, freed, dropped]).encode())

    def _send_late(self) -> None:
        # The holder of the lock checks `_late` again after its release.
        while self._late and self._work_lock.acquire(blocking=False):
            try:
                while self._late:
                    _send(self._work, self._late.popleft())
            finally:
                self._work_lock.release()

    def _close(self) -> None:
        for each in self._sockets:
            each.close()


def _receive(source: socket.socket) -> bytes:
    try:
        return source.recv(RECEIVE_BYTES)
    except OSError:
        return b""


def _send(to: socket.socket, data: bytes) -> None:
    try:
        to.sendall(data)
    except OSError:
        end_group()


def end_group() -> None:
    """End this process and all processes that model.py has started."""
    if os.getpgrp() == os.getpid():  # the gateway makes a worker the leader of a group
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
