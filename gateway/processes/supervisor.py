"""Supervision of frontend processes: start, watchdog, restart, shutdown."""

import asyncio
import logging
import pickle
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gateway.event_loop import LoopReading
from gateway.processes.channel import NO_CALL, Channel, Frame, number
from gateway.processes.messages import FrontendKind, read_loop
from gateway.processes.module_commands import module_command, module_environment
from gateway.settings import LogSettings

log = logging.getLogger("sluice.server")

FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.1, 5.0
"""Pause before a restart; doubled after each process that ends early."""

STEADY_SECS = 10.0
"""Running time of a process that resets the pause."""

ANSWER_SECS = 10.0
"""Timeout for the answer to a ping; a process that exceeds it is killed and restarted."""

START_SECS = 60.0
"""Timeout for the first answer of a process, which has to import its modules."""

EXIT_SECS = 5.0
"""Time for a process to exit after its channel is closed, before it is killed."""

OnFrame = Callable[[Channel, Frame], None]


class FrontendProcess:
    """One frontend process with its listening sockets; a process that ends is restarted.

    `up` is true while a process runs and has answered; `restarts` counts the restarts. `loop` has
    the blocks of the event loops of all of them, as of the last ping.
    """

    def __init__(self, index: int, settings: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        self._name = f"frontend {index}"
        self._settings = settings
        self._descriptors = descriptors
        self._channel: Channel | None = None
        self._is_stopping = False
        self._has_answered = False
        self.up = False
        self.restarts = 0
        self.loop = self._ended_loops = LoopReading()
        self._stop_frames: list[tuple[int, bytes]] = []

    async def run(self, on_frame: OnFrame) -> None:
        """Keep a process running; return when it has ended after `stop`."""
        pause, time = FIRST_PAUSE_SECS, asyncio.get_running_loop().time
        while not self._is_stopping:
            began = time()
            try:
                status = await self._run_once(on_frame)
            except OSError as error:
                status = error.strerror or str(error)
            if self._is_stopping:
                return
            log.error("%s ended", self._name, extra={"status": status, "again_in_secs": pause})
            await asyncio.sleep(pause)
            steady = time() - began > STEADY_SECS
            pause = FIRST_PAUSE_SECS if steady else min(2 * pause, LONGEST_PAUSE_SECS)
            self.restarts += 1

    def stop(self, kind: int, payload: bytes = b"") -> None:
        """Send a frame of the shutdown, also to a process that replaces this one."""
        self._is_stopping = True
        self._stop_frames.append((kind, payload))
        if self._channel is not None:
            self._channel.send(kind, NO_CALL, payload)

    def change_log(self, settings: LogSettings) -> None:
        """Send new log settings."""
        self._settings = {**self._settings, "log": settings}
        if self._channel is not None:
            self._channel.send(FrontendKind.LOG, NO_CALL, pickle.dumps(settings))

    async def _run_once(self, on_frame: OnFrame) -> int | str:
        """Run one process; its exit status, or the reason of a kill. OSError if it cannot start."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = self._start(theirs)
            try:
                await self._converse(ours.dup(), on_frame)
            except TimeoutError:
                process.kill()
                return f"killed after {ANSWER_SECS:g} s without an answer"
            finally:
                self._channel, self.up = None, False
                self._ended_loops = self.loop
                ours.shutdown(socket.SHUT_RDWR)
                status = await _ended(process)
        return status

    async def _converse(self, connection: socket.socket, on_frame: OnFrame) -> None:
        """Send the settings and handle frames until the process disconnects.

        Raises TimeoutError if it hangs.
        """

        def received(frame: Frame) -> None:
            self._has_answered = self.up = True
            if frame.kind == FrontendKind.PONG:
                self.loop = self._ended_loops.with_other(read_loop(frame.payload))
            else:
                on_frame(channel, frame)

        channel = Channel(received)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=connection)
        channel.send(FrontendKind.SETTINGS, NO_CALL, pickle.dumps(self._settings))
        self._channel = channel
        for kind, payload in self._stop_frames:
            channel.send(kind, NO_CALL, payload)
        try:
            await self._watch(channel)
        finally:
            channel.close()

    async def _watch(self, channel: Channel) -> None:
        """Ping until the process disconnects; TimeoutError if it does not answer."""
        time = asyncio.get_running_loop().time
        ends_at = time() + START_SECS
        while not channel.is_lost:
            self._has_answered = False
            channel.send(FrontendKind.PING)
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECS):
                    await channel.lost()
            if self._has_answered:
                ends_at = 0.0
            elif not channel.is_lost and time() > ends_at:
                raise TimeoutError

    def _start(self, connection: socket.socket) -> "subprocess.Popen[bytes]":
        descriptor = connection.fileno()
        return subprocess.Popen(
            module_command("gateway.processes", str(descriptor)),
            stdin=subprocess.DEVNULL,
            env=module_environment(),
            pass_fds=(descriptor, *self._descriptors),
            start_new_session=True,  # signals of the terminal go to the server only
        )


async def _ended(process: "subprocess.Popen[bytes]") -> int:
    """The exit status of a process without a channel; killed after EXIT_SECS."""
    with suppress(subprocess.TimeoutExpired):
        return await asyncio.to_thread(process.wait, EXIT_SECS)
    process.kill()
    return await asyncio.to_thread(process.wait)


def in_ms(secs: float) -> bytes:
    """The payload of a time in milliseconds."""
    return number(min(int(secs * 1000), (1 << 32) - 1))
