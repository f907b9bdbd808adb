"""Conversations of the chat: turns, the messages for the model, and the session around them."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from gateway.tools.chat.options import SamplingParameters
from gateway.tools.chat.server import AnswerPart, ChatError, ChatModel, ChatServer, Question

Message = Mapping[str, str]


@dataclass(slots=True, eq=False)
class ChatTurn:
    """A question and its answer so far; `before` is the number of earlier turns."""

    question: str
    before: int
    answer: str = ""
    interrupted: bool = False


class ChatConversation:
    """Turns with an answer or a part of one; unanswered questions are dropped.

    So roles alternate, as most chat templates require.
    """

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[ChatTurn] = []
        self._latest: ChatTurn | None = None

    @property
    def turns(self) -> Sequence[ChatTurn]:
        """The answered turns, oldest first."""
        return self._turns

    def begin(self, question: str) -> ChatTurn:
        """A new turn; it becomes part of the conversation when it ends with an answer."""
        return self._begin(question, len(self._turns))

    def begin_again(self) -> ChatTurn | None:
        """The latest question again, in place of its answer; None before the first question."""
        if self._latest is None:
            return None
        return self._begin(self._latest.question, self._latest.before)

    def messages(self, turn: ChatTurn) -> Sequence[Message]:
        """The messages of this turn for the model."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for each in self._turns[: turn.before]:
            said.append({"role": "user", "content": each.question})
            said.append({"role": "assistant", "content": each.answer})
        return [*said, {"role": "user", "content": turn.question}]

    def end(self, turn: ChatTurn) -> None:
        """Keep a turn if it has an answer; it replaces an earlier answer to the question."""
        if turn.answer:
            self._turns[turn.before :] = [turn]

    def clear(self) -> None:
        """Drop all turns; the system prompt is kept."""
        self._turns.clear()
        self._latest = None

    def markdown(self, title: str, speaker: str) -> str:
        """The whole conversation as Markdown; `speaker` is the heading of answers."""
        parts = [f"# {title}"]
        if self.system:
            parts += ["## System", self.system]
        for turn in self._turns:
            parts += ["## You", turn.question, f"## {speaker}", turn.answer.strip()]
            if turn.interrupted:
                parts.append("*(interrupted)*")
        return "\n\n".join(parts) + "\n"

    def _begin(self, question: str, before: int) -> ChatTurn:
        self._latest = ChatTurn(question, before)
        return self._latest


class Session:
    """One chat with one model of a server."""

    def __init__(
        self,
        server: ChatServer,
        model: ChatModel,
        conversation: ChatConversation,
        sampling: SamplingParameters,
    ) -> None:
        self.server = server
        self.model = model
        self.conversation = conversation
        self.sampling = sampling
        self._saved: set[Path] = set()

    async def answer(self, turn: ChatTurn) -> AsyncGenerator[AnswerPart, None]:
        """Send the question of a turn and yield the parts of the answer.

        The received parts stay in the conversation in any case; closing cancels the request.
        Raises Unreachable and Refused.
        """
        messages = self.conversation.messages(turn)
        question = Question(self.model, messages, self.sampling.values)
        turn.interrupted = True
        try:
            async with aclosing(self.server.answer(question)) as parts:
                async for part in parts:
                    turn.answer += part.text
                    yield part
            turn.interrupted = False
        finally:
            self.conversation.end(turn)

    def save(self, path: Path) -> Path:
        """Write the conversation to a file; only files that this chat wrote are overwritten.

        Raises ChatError if the file exists or cannot be written.
        """

        path = path.expanduser()
        text = self.conversation.markdown(f"Chat with {self.model.name}", self.model.name)
        try:
            with path.open("w" if path.resolve() in self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ChatError(f"{path} exists: choose another name") from None
        except OSError as error:
            raise ChatError(f"{path} cannot be written: {error.strerror}") from None
        self._saved.add(path.resolve())
        return path
