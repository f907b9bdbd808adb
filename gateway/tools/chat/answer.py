"""Answers on a terminal: Markdown, drawn again as it grows, and the pace of the tokens."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from gateway.tools.chat.server import AnswerPart, ChatError

DRAWN_PER_SEC = 10
INTERRUPTED = "interrupted"
STATUS_LINES = 2
"""The status line and the line before it."""

PARSER = MarkdownIt().enable(["strikethrough", "table"]).disable(["html_block", "html_inline"])
"""Without HTML, which a terminal cannot show: tags are shown as text instead."""
CONTROLS = {
    **dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), "\N{REPLACEMENT CHARACTER}"),
    ord("\n"): "\n",
    ord("\t"): "\t",
    ord("\r"): None,
}
CUT_OFF = "length"
"""The finish reason of an answer that reached its limit of tokens."""
LEAST_SECS = 0.1
"""A shorter answer has no meaningful speed."""


class LiveAnswer:
    """The display of a growing answer; the answer and its pace remain after the `with` block."""

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

    def add(self, part: AnswerPart) -> None:
        """Show a part that has just arrived."""
        now = self._clock()
        self._pace.add(part, now)
        self._growing += printable(part.text)
        if "\n" in self._growing and now - self._looked > 1 / DRAWN_PER_SEC:
            self._looked = now
            self._print_whole_blocks()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The end of the growing block, as many lines as the terminal has, and the pace."""
        lines = console.render_lines(Answer(self._growing), options.update(height=None), pad=False)
        room = max(console.height - STATUS_LINES - 1, 1)
        for line in lines[-room:]:
            yield from line
            yield Segment.line()
        status = self._pace.summary(self._clock())
        yield Text(status, style="dim", no_wrap=True, overflow="ellipsis")

    def _ending(self, error: BaseException | None) -> str:
        """The line below the answer; "" if only an error is shown."""
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


def printable(text: str) -> str:
    """The text without control characters of terminals."""
    return text.translate(CONTROLS)


class Answer(Markdown):
    """Markdown of a model; line breaks are kept."""

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark", justify="default", hyperlinks=False)
        self.parsed = PARSER.parse(printable(text))
        for token in self.parsed:
            _keep_lines(token)


def whole_blocks(text: str) -> int:
    """The length of the leading blocks that are complete.

    The rest, the block that still grows, can be rendered alone. The text must be printable:
    the parser takes other control characters for line ends.
    """
    starts = [token.map[0] for token in PARSER.parse(text) if token.level == 0 and token.map]
    last = starts[-1] if starts else 0
    return sum(len(line) + 1 for line in text.split("\n")[:last])


def _keep_lines(token: Token) -> None:
    for child in token.children or ():
        if child.type == "softbreak":
            child.type = "hardbreak"


class Pace:
    """The pace of one answer; times are seconds of the caller's clock."""

    def __init__(self, asked: float) -> None:
        self._asked = asked
        self._first: float | None = None
        self._last = asked
        self._counted: int | None = None
        self._responses = 0
        self._in_first = 0
        self._cut_off = False

    def add(self, part: AnswerPart, now: float) -> None:
        """Count a part that has just arrived."""
        if part.tokens is not None:
            self._counted = (self._counted or 0) + part.tokens
        self._cut_off = self._cut_off or part.finish_reason == CUT_OFF
        if not (part.text or part.tokens):
            return
        self._responses += 1
        self._last = now
        if self._first is None:
            self._first, self._in_first = now, self.amount

    @property
    def first_token_secs(self) -> float | None:
        """From the question to the first token; None before it."""
        return None if self._first is None else self._first - self._asked

    @property
    def amount(self) -> int:
        """Tokens so far; responses, if the model does not count its tokens."""
        return self._responses if self._counted is None else self._counted

    @property
    def per_sec(self) -> float | None:
        """`amount` per second after the first response; None for a very short answer."""
        if self._first is None or self._last - self._first < LEAST_SECS:
            return None
        return (self.amount - self._in_first) / (self._last - self._first)

    def summary(self, now: float) -> str:
        """One line: time to first token, amount and speed."""

        if self.first_token_secs is None:
            return f"waiting {now - self._asked:.1f} s"
        unit = "response" if self._counted is None else "token"
        many = "" if self.amount == 1 else "s"
        shown = [f"first token {self.first_token_secs:.2f} s", f"{self.amount} {unit}{many}"]
        if self.per_sec is not None:
            shown.append(f"{self.per_sec:.1f} {unit}s/s")
        if self._cut_off:
            shown.append("cut off at the limit of tokens")
        return " · ".join(shown)
