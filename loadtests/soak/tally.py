"""Counts of all that clients of the soak did, and of all that they met."""

import re
from collections import Counter
from dataclasses import dataclass, field

from loadtests.soak.asking import Question, Refused
from loadtests.soak.models import Model, Trouble

UNAVAILABLE = frozenset({"503", "UNAVAILABLE"})
CANCELLED = re.compile("cancelled|CANCELLED|canceled", re.IGNORECASE)
DROPPED = "--resumable-buffer-size"
"""An event that was dropped because its stream was too long to be kept whole."""

EXPIRED = "no such stream to go on with"
"""A client whose frontend was killed may return late."""

SEQUENCE = re.compile("sequence|correlation|Request was cancelled", re.IGNORECASE)
"""Requests of a sequence end with the one before them."""

LIMITS = re.compile("Request timeout expired|Exceeds maximum queue size|exceeds maximum queue")
GONE = re.compile(
    r"unknown model|is not ready|unloaded|no (available|ready) version|not found|is being restarted"
    r"|has no available versions|unavailable|Stub process|given up|does not serve"
)
NUMBERS = re.compile(r"\d[\d.]*")
MOST_SURPRISES = 20


@dataclass(slots=True)
class Tally:
    """`asked`, `answered` and `refused` are requests by model, `acts` what was done, by name.

    A request that its client left counts as asked alone.
    """

    asked: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    surprises: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    cuts: bool = False
    """Whether frontends were killed or the server stops, so that a connection may end any time."""

    def ask(self, question: Question) -> None:
        """A request, or a part of one, was sent."""
        self.asked[question.model.name] += 1

    def answer(self, question: Question) -> None:
        """It was answered as it should be."""
        self.answered[question.model.name] += 1

    def refuse(self, question: Question, refusal: Refused, *, stopped: bool = False) -> None:
        """It was refused; `stopped` says that its client had it cancelled."""
        model = question.model
        self.refused[model.name] += 1
        self.refusals[f"{refusal.code} {NUMBERS.sub('N', refusal.text)[:100]}"] += 1
        cut = self.cuts and (refusal.code == "UNAVAILABLE" or EXPIRED in refusal.text)
        asked_for = stopped and CANCELLED.search(refusal.text)
        if not (cut or asked_for or explained(model, refusal)):
            self.surprise(f"{model.name}: {refusal}")

    def surprise(self, text: str) -> None:
        """A client met what no act explains."""
        if len(self.surprises) < MOST_SURPRISES:
            self.surprises.append(text[:300])


def explained(model: Model, refusal: Refused) -> bool:
    """Whether a model may refuse with that, after all that is done to it."""
    disturbed = model.troubles & {Trouble.KILLED, Trouble.RELOADED}
    if disturbed and (refusal.code in UNAVAILABLE or GONE.search(refusal.text)):
        return True
    if Trouble.LIMITED in model.troubles and LIMITS.search(refusal.text):
        return True
    if DROPPED in refusal.text:
        return True
    return bool(model.sequences and SEQUENCE.search(refusal.text))
