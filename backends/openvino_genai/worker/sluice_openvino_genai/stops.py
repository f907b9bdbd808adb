"""Stop strings in a text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StoppedText:
    """Text that can be sent, and the found stop string, "" for none."""

    text: str
    found: str = ""


class StopFinder:
    """Holds back text that may begin a stop string; `include` leaves a found one in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def read(self, text: str, *, active: bool, final: bool) -> StoppedText:
        """The text up to a stop string; nothing is found while not `active`."""
        if not self._stops:
            return StoppedText(text)
        held = self._held + text
        if not active:
            self._held = ""
            return StoppedText(held)
        places = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if places:
            at, stop = min(places)
            self._held = ""
            return StoppedText(held[: at + len(stop) if self._include else at], stop)
        kept = 0 if final else self._begun(held)
        self._held = held[len(held) - kept :]
        return StoppedText(held[: len(held) - kept])

    def _begun(self, text: str) -> int:
        """The length of the longest end of the text that begins a stop string."""
        for length in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
