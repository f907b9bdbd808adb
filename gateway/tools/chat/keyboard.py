"""What the user types: lines with editing and history where Python has it, and keys kept quiet."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

CONTINUED = "\\"
"""A line that ends with it goes on in the next one."""


class Keyboard:
    """Standard input, which is a terminal. Making it gives `input` editing and a history."""

    def __init__(self) -> None:
        self._readline = _if_there("readline")
        self._termios = _if_there("termios")

    def question(self, prompt: str, more: str) -> str:
        """One line, or several as one text; EOFError and KeyboardInterrupt as from `input`."""
        lines = [input(prompt)]
        while lines[-1].endswith(CONTINUED):
            lines[-1] = lines[-1].removesuffix(CONTINUED)
            lines.append(input(more))
        return "\n".join(lines)

    def had_text(self) -> bool:
        """Whether there was something on the line that Ctrl-C has just taken away."""
        return bool(self._readline and self._readline.get_line_buffer())

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Do not echo what is typed, which would get into an answer; it waits for the next line."""
        if self._termios is None:
            yield
            return
        before = self._termios.tcgetattr(sys.stdin)
        modes = [*before]
        modes[3] &= ~self._termios.ECHO
        self._termios.tcsetattr(sys.stdin, self._termios.TCSADRAIN, modes)
        try:
            yield
        finally:
            self._termios.tcsetattr(sys.stdin, self._termios.TCSADRAIN, before)


def _if_there(module: str) -> ModuleType | None:
    """A module that not every build of Python has."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
