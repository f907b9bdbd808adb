"""The ids of events: which response of which recorded stream is meant?"""

from dataclasses import dataclass

MAX_DIGITS = 15
"""No stream is longer, and no such number takes long to read."""


@dataclass(frozen=True, slots=True)
class EventId:
    """A response of a recorded stream: `token.number`, numbers from 1; 0 is before the first."""

    token: str
    number: int

    def __str__(self) -> str:
        return f"{self.token}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "EventId | None":
        """The id back; None if it is none of ours."""
        token, _, number = text.strip().rpartition(".")
        if not (token and number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS):
            return None
        return cls(token, int(number))
