"""A program at a pseudo-terminal: a test types, and waits for output."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.serving import WAIT_SECS, wait_until

ROOT = Path(__file__).resolve().parents[4]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]|[\x01\x02]")
CTRL_C = "\x03"
CTRL_D = "\x04"


class PseudoTerminal:
    """`shown` is all that the program has written, without the terminal's control sequences."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int]
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**_environment(), "TERM": "xterm", "LC_ALL": "C.UTF-8", **environment},
            # Ctrl-C is the terminal's to send, to the session that it controls.
            preexec_fn=lambda: _control(slave),
        )
        self._written = b""
        self._seen = 0
        self._slave = slave
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def written(self) -> str:
        """All that it has written, control sequences too."""
        return self._written.decode(errors="replace").replace("\r\n", "\n")

    @property
    def shown(self) -> str:
        """The same without control sequences; what was drawn anew is in it again."""
        return ESCAPES.sub("", self.written)

    @property
    def echoes(self) -> bool:
        """Whether what is typed is shown by the terminal."""
        return bool(termios.tcgetattr(self._slave)[3] & termios.ECHO)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._master, text.encode())

    def interrupt_input(self) -> None:
        """Press Ctrl-C at a prompt that is shown, once the program waits for a key.

        Python's `input` looks for signals only when one ends this wait.
        """
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: ") S " in stat.read_text(), f"sleeping at\n{self.shown}")
        self.type(CTRL_C)

    def enter(self, line: str) -> None:
        """Type a line."""
        self.type(f"{line}\r")

    def wait_shown(self, text: str) -> str:
        """Wait until a text is shown behind what was waited for before; what stands before it."""
        wait_until(lambda: text in self.shown[self._seen :], f"{text!r} in\n{self.shown}")
        start = self.shown.index(text, self._seen)
        before = self.shown[self._seen : start]
        self._seen = start + len(text)
        return before

    def ended(self) -> int:
        """Wait for the program's end: its exit status."""
        return self.process.wait(WAIT_SECS)

    def close(self) -> None:
        """End the program if it has not ended, and let go of the terminal."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._slave)
        self._reader.join(WAIT_SECS)
        os.close(self._master)

    def _read(self) -> None:
        # Once no process has the other end open, reading fails.
        with contextlib.suppress(OSError):
            while more := os.read(self._master, 65536):
                self._written += more


@contextlib.contextmanager
def at_terminal(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    size: tuple[int, int] = (24, 100),
) -> Iterator[PseudoTerminal]:
    """`sluice` with these arguments at a terminal of this size."""
    command = [sys.executable, "-m", "gateway", *arguments]
    terminal = PseudoTerminal(command, environment or {}, size)
    try:
        yield terminal
    finally:
        terminal.close()


def _environment() -> dict[str, str]:
    """Ours, but for what is said of another terminal than this."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


def _control(slave: int) -> None:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
