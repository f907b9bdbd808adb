"""What does a chat hold while it lasts: its model, conversation, sampling, and files."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from gateway.tools.chat.conversation import Conversation, Turn
from gateway.tools.chat.sampling import Sampling
from gateway.tools.chat.server import ChatError, ChatModel, ChatServer, Part, Question


class Session:
    """One chat with one model of a server."""

    def __init__(
        self, server: ChatServer, model: ChatModel, conversation: Conversation, sampling: Sampling
    ) -> None:
        self.server = server
        self.model = model
        self.conversation = conversation
        self.sampling = sampling
        self._saved: set[Path] = set()

    async def answer(self, turn: Turn) -> AsyncGenerator[Part, None]:
        """Ask what a turn asks, and yield the answer's parts.

        However it ends, what has come stays in the conversation; leaving it cancels the request.
        Raises ServerGone and Refused.
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
        """Write the conversation to a file; one that this chat has not written is not overwritten.

        ChatError says why it cannot be written.
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
