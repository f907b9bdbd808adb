"""An answer while it comes: what is whole is printed once, the rest is drawn anew as it grows."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from gateway.tools.chat.markdown import Answer, printable, whole_blocks
from gateway.tools.chat.pace import Pace
from gateway.tools.chat.server import ChatError, Part

DRAWN_PER_SEC = 10
INTERRUPTED = "interrupted"
STATUS_LINES = 2
"""The status and the line before it."""


class LiveAnswer:
    """Where on a terminal an answer appears; after the block the answer and its pace stay."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._pace = Pace(clock())
        self._growing = ""
        self._printed = False
        self._looked = clock()
        self._live = Live(self, console=console, refresh_per_second=DRAWN_PER_SEC, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        self._print(self._growing)
        if ending := self._ending(error):
            self._console.print(Text(ending, style="dim"))

    def add(self, part: Part) -> None:
        """Show a part that has just come."""
        now = self._clock()
        self._pace.add(part, now)
        self._growing += printable(part.text)
        if "\n" in self._growing and now - self._looked > 1 / DRAWN_PER_SEC:
            self._looked = now
            self._print_whole_blocks()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As much of the end of the growing block as the terminal has lines, and the pace."""
        lines = console.render_lines(Answer(self._growing), options.update(height=None), pad=False)
        room = max(console.height - STATUS_LINES - 1, 1)
        for line in lines[-room:]:
            yield from line
            yield Segment.line()
        status = self._pace.summary(self._clock())
        yield Text(status, style="dim", no_wrap=True, overflow="ellipsis")

    def _ending(self, error: BaseException | None) -> str:
        """The line below the answer; "" if an error speaks for itself."""
        parts = []
        if self._pace.first_token_secs is not None:
            parts.append(self._pace.summary(self._clock()))
        elif error is None:
            parts.append("the model had nothing to say")
        if error is not None and not isinstance(error, ChatError):
            parts.append(INTERRUPTED)
        return " · ".join(parts)

    def _print_whole_blocks(self) -> None:
        end = whole_blocks(self._growing)
        whole, self._growing = self._growing[:end], self._growing[end:]
        self._print(whole)

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self._printed:
            self._console.print()
        self._printed = True
        self._console.print(Answer(text))
