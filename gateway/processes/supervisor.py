"""The frontend processes as the server sees them: started, heard, started again, ended."""

import asyncio
import logging
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gateway.processes.channel import NO_CALL, Channel, Frame, headed, number
from gateway.processes.messages import FrontendKind
from gateway.python_processes import module_command, module_environment

log = logging.getLogger("sluice.server")

FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.1, 5.0
"""Before a process that has ended is started again; twice as long after each that ends at once."""

STEADY_SECS = 10.0
"""So long a process must have run for the pause to begin anew."""

PATIENCE_SECS = 10.0
"""A process that has answered nothing for so long hangs: it is killed, and another one started."""

START_SECS = 60.0
"""The same for one that has answered nothing yet: it has to import what it needs."""

EXIT_SECS = 5.0
"""So long a process may take to end when its connection has, before it is killed."""

Hear = Callable[[Channel, Frame], None]


class FrontendProcess:
    """One of them, with the sockets that it accepts at, and the next one when it has ended.

    `up` says that one runs and has begun to answer, `restarts` how often another had to be started.
    """

    def __init__(self, index: int, told: Mapping[str, Any], passed: Sequence[int]) -> None:
        self._name = f"frontend {index}"
        self._told = told
        self._passed = passed
        self._channel: Channel | None = None
        self._is_stopping = False
        self._has_answered = False
        self.up = False
        self.restarts = 0
        self._last_words: list[tuple[int, bytes]] = []

    async def run(self, hear: Hear) -> None:
        """Keep one running until it has been told to stop, and has ended."""
        pause, time = FIRST_PAUSE_SECS, asyncio.get_running_loop().time
        while not self._is_stopping:
            began = time()
            try:
                status = await self._run_once(hear)
            except OSError as error:
                status = error.strerror or str(error)
            if self._is_stopping:
                return
            log.error("%s ended", self._name, extra={"status": status, "again_in_secs": pause})
            await asyncio.sleep(pause)
            steady = time() - began > STEADY_SECS
            pause = FIRST_PAUSE_SECS if steady else min(2 * pause, LONGEST_PAUSE_SECS)
            self.restarts += 1

    def tell(self, kind: int, payload: bytes = b"") -> None:
        """Say something that ends it, also to the next one if this one ends before it hears."""
        self._is_stopping = True
        self._last_words.append((kind, payload))
        if self._channel is not None:
            self._channel.send(kind, NO_CALL, payload)

    def log_differently(self, settings: Mapping[str, Any]) -> None:
        """Say how to log from now on."""
        self._told = {**self._told, "log": settings}
        if self._channel is not None:
            self._channel.send(FrontendKind.LOG, NO_CALL, headed(settings))

    async def _run_once(self, hear: Hear) -> int | str:
        """Start one and wait for its end; its exit status. OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = self._start(theirs)
            try:
                await self._talk(ours.dup(), hear)
            except TimeoutError:
                process.kill()
                return f"it has answered nothing for {PATIENCE_SECS:g} s, and was killed"
            finally:
                self._channel, self.up = None, False
                ours.shutdown(socket.SHUT_RDWR)
                status = await _ended(process)
        return status

    async def _talk(self, connection: socket.socket, hear: Hear) -> None:
        """Tell it what it must know, and hear what it says until it ends.

        Raises TimeoutError if it hangs.
        """

        def heard(frame: Frame) -> None:
            self._has_answered = self.up = True
            if frame.kind != FrontendKind.PONG:
                hear(channel, frame)

        channel = Channel(heard)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=connection)
        channel.send(FrontendKind.SETTINGS, NO_CALL, headed(self._told))
        self._channel = channel
        for kind, payload in self._last_words:
            channel.send(kind, NO_CALL, payload)
        try:
            await self._watch(channel)
        finally:
            channel.close()

    async def _watch(self, channel: Channel) -> None:
        """Wait until it is gone; TimeoutError once it does not answer."""
        time = asyncio.get_running_loop().time
        ends_at = time() + START_SECS
        while not channel.is_lost:
            self._has_answered = False
            channel.send(FrontendKind.PING)
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_SECS):
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
            pass_fds=(descriptor, *self._passed),
            start_new_session=True,  # signals of the terminal are the server's
        )


async def _ended(process: "subprocess.Popen[bytes]") -> int:
    """The exit status of a process that has nothing more to do; one that goes on is killed."""
    with suppress(subprocess.TimeoutExpired):
        return await asyncio.to_thread(process.wait, EXIT_SECS)
    process.kill()
    return await asyncio.to_thread(process.wait)


def in_ms(secs: float) -> bytes:
    """A time as frames have it."""
    return number(min(int(secs * 1000), (1 << 32) - 1))
