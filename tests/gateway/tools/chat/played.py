"""A server without a wire: it has the models, and gives the answers, that a test says."""

from collections.abc import AsyncGenerator, Sequence

from gateway.tools.chat.conversation import ChatConversation, Session
from gateway.tools.chat.options import SamplingParameters
from gateway.tools.chat.server import AnswerPart, ChatModel, ChatServer, Listed, Question, Refused

Step = AnswerPart | Exception


def chat_model(name: str = "m", platform: str = "python", *inputs: str) -> ChatModel:
    """A model that chats, with these inputs besides the messages."""
    names = ("messages", *inputs)
    return ChatModel(name, platform, dict.fromkeys(names, 1), frozenset({"text_output"}))


class PlayedServer(ChatServer):
    """Answers every question with the same steps; `asked` are the questions, `left` how many
    answers were left before their end."""

    def __init__(
        self, *steps: Step, models: Sequence[ChatModel] = (), listed: Sequence[Listed] | None = None
    ) -> None:
        self.url = "played:1"
        self.asked: list[Question] = []
        self.left = 0
        self._steps = steps
        self._models = {model.name: model for model in models}
        self._listed = listed

    async def models(self) -> Sequence[Listed] | None:
        return self._listed

    async def describe(self, name: str) -> ChatModel:
        if name not in self._models:
            raise Refused(f"Request for unknown model: '{name}' is not found")
        return self._models[name]

    async def answer(self, question: Question) -> AsyncGenerator[AnswerPart, None]:
        self.asked.append(question)
        self.left += 1
        for step in self._steps:
            if isinstance(step, Exception):
                raise step
            yield step
        self.left -= 1

    async def close(self) -> None:
        """Nothing is held."""


def session(server: PlayedServer, system: str = "") -> Session:
    """A chat with model `m` of the server."""
    return Session(server, chat_model(), ChatConversation(system), SamplingParameters({}))
