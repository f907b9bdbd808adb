"""What was said so far, and what of it a model is told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Message = Mapping[str, str]


@dataclass(slots=True, eq=False)
class Turn:
    """A question and what there is of its answer; `before` is how many turns went before it."""

    question: str
    before: int
    answer: str = ""
    interrupted: bool = False


class Conversation:
    """Turns that have an answer, or a part of one; what was never answered is not kept.

    So roles alternate, which most chat templates insist on.
    """

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Turn] = []
        self._latest: Turn | None = None

    @property
    def turns(self) -> Sequence[Turn]:
        """What was asked and answered, oldest first."""
        return self._turns

    def begin(self, question: str) -> Turn:
        """A new turn; it is part of the conversation once it has ended with an answer."""
        return self._begin(question, len(self._turns))

    def begin_again(self) -> Turn | None:
        """The latest question once more, in place of its answer; None if nothing was asked."""
        if self._latest is None:
            return None
        return self._begin(self._latest.question, self._latest.before)

    def messages(self, turn: Turn) -> Sequence[Message]:
        """What a model is asked in this turn."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for each in self._turns[: turn.before]:
            said.append({"role": "user", "content": each.question})
            said.append({"role": "assistant", "content": each.answer})
        return [*said, {"role": "user", "content": turn.question}]

    def end(self, turn: Turn) -> None:
        """Keep a turn if it has an answer; an earlier answer to the question goes then."""
        if turn.answer:
            self._turns[turn.before :] = [turn]

    def clear(self) -> None:
        """Forget all of it but the system prompt."""
        self._turns.clear()
        self._latest = None

    def markdown(self, title: str, speaker: str) -> str:
        """The whole conversation as a document; `speaker` is who answered."""
        parts = [f"# {title}"]
        if self.system:
            parts += ["## System", self.system]
        for turn in self._turns:
            parts += ["## You", turn.question, f"## {speaker}", turn.answer.strip()]
            if turn.interrupted:
                parts.append("*(interrupted)*")
        return "\n\n".join(parts) + "\n"

    def _begin(self, question: str, before: int) -> Turn:
        self._latest = Turn(question, before)
        return self._latest
