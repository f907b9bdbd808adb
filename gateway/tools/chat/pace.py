"""How fast did an answer come?"""

from gateway.tools.chat.server import Part

CUT_OFF = "length"
"""The finish reason of an answer that reached its limit of tokens."""


LEAST_SECS = 0.1
"""What comes in less than that has no speed that means anything."""


class Pace:
    """The times of one answer, in seconds of any one clock, which its owner reads."""

    def __init__(self, asked: float) -> None:
        self._asked = asked
        self._first: float | None = None
        self._last = asked
        self._counted: int | None = None
        self._responses = 0
        self._in_first = 0
        self._cut_off = False

    def add(self, part: Part, now: float) -> None:
        """Take note of a part that has just come."""
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
        """How many of them a second come after the first response; None if that took no time."""
        if self._first is None or self._last - self._first < LEAST_SECS:
            return None
        return (self.amount - self._in_first) / (self._last - self._first)

    def summary(self, now: float) -> str:
        """One line: how long until the first token, how much, how fast."""
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
