"""The server as the chat sees it: models, questions, answers and errors, on either protocol."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

MESSAGES = "messages"
TEXT_OUTPUT = "text_output"
STREAM = "stream"
SAMPLING_PARAMETERS = "sampling_parameters"
NUM_OUTPUT_TOKENS = "num_output_tokens"
FINISH_REASON = "finish_reason"
ASKED_FOR = (NUM_OUTPUT_TOKENS, FINISH_REASON)
"""Outputs that an LLM returns if its input `return_*` is true."""

READY = "READY"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
VLLM = "vllm"
UNTIL_THE_CONTEXT_ENDS: Mapping[str, Any] = {"max_tokens": None}
"""vLLM's own default ends an answer after 16 tokens."""

INT64 = range(-(2**63), 2**63)
NO_TEMPLATE = re.compile(r"(no|provide a|without a) chat template", re.IGNORECASE)


class ChatError(Exception):
    """A failure that ends the command or the turn; the message is one line, with the fix."""


class Unreachable(ChatError):
    """No server answers at the address."""


class Refused(ChatError):
    """The server or the model refuses the request; the message is theirs."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One version of a model in the server's index."""

    name: str
    state: str
    reason: str

    @property
    def ready(self) -> bool:
        """Whether the version serves."""
        return self.state == READY


@dataclass(frozen=True, slots=True)
class ChatModel:
    """Metadata of a model: its inputs with their ranks, and its outputs."""

    name: str
    platform: str
    inputs: Mapping[str, int]
    outputs: frozenset[str]

    @property
    def chats(self) -> bool:
        """Whether it has an input for conversations and an output for text."""
        return MESSAGES in self.inputs and TEXT_OUTPUT in self.outputs


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation for a model to continue, with sampling parameters."""

    model: ChatModel
    messages: Sequence[Mapping[str, str]]
    sampling: Mapping[str, Any]

    def inputs(self) -> Mapping[str, str | bool]:
        """The inputs that the model has, by name; JSON is text.

        Raises Refused for text that is not UTF-8.
        """
        self._check_encoding()
        known = self.model.inputs
        flags = [STREAM, *(f"return_{output}" for output in ASKED_FOR)]
        inputs: dict[str, str | bool] = {MESSAGES: json.dumps(self.messages)}
        inputs.update((flag, True) for flag in flags if flag in known)
        if SAMPLING_PARAMETERS in known and (sampling := self._sampling()):
            inputs[SAMPLING_PARAMETERS] = json.dumps(sampling)
        return inputs

    def parameters(self) -> Mapping[str, str | bool | int | float]:
        """The request parameters: the sampling, for a model without an input for it.

        Raises Refused for a value that no request parameter can have.
        """
        if SAMPLING_PARAMETERS in self.model.inputs:
            return {}
        for name, value in self.sampling.items():
            if not _fits_a_parameter(value):
                raise Refused(
                    f"'{name}' is {json.dumps(value)}, but model '{self.model.name}' takes texts, "
                    "booleans and numbers of 64 bits only: it has no input "
                    f"'{SAMPLING_PARAMETERS}'"
                )
        return self.sampling

    def _check_encoding(self) -> None:
        # Invalid bytes from a terminal or a command line arrive as surrogates.
        parts = {each["role"]: each["content"] for each in self.messages}
        parts["sampling"] = json.dumps(dict(self.sampling), ensure_ascii=False)
        for what, text in parts.items():
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise Refused(f"the text of '{what}' is not UTF-8: {text[:40]!a}")

    def _sampling(self) -> Mapping[str, Any]:
        unbounded = UNTIL_THE_CONTEXT_ENDS if self.model.platform == VLLM else {}
        return {**unbounded, **self.sampling}


def _fits_a_parameter(value: Any) -> bool:
    if isinstance(value, int):
        return value in INT64
    return isinstance(value, str | float)


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """One response: the added text, its number of tokens, and the finish reason of the last.

    `tokens` is None if the model does not count tokens.
    """

    text: str
    tokens: int | None = None
    finish_reason: str = ""


class ChatServer(ABC):
    """A server by HTTP or gRPC. Every method raises Unreachable and Refused."""

    url: str

    @abstractmethod
    async def models(self) -> Sequence[Listed] | None:
        """The index, one row for each version; None if the server has none."""

    @abstractmethod
    async def describe(self, name: str) -> ChatModel:
        """The metadata of a ready model."""

    @abstractmethod
    def answer(self, question: Question) -> AsyncGenerator[AnswerPart, None]:
        """The parts of an answer as they arrive. Closing the generator cancels the request."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection."""


def refusal(model: str, message: str) -> Refused:
    """The error of a model, with a fix where the server cannot know it."""

    if NO_TEMPLATE.search(message):
        return Refused(
            f"model '{model}' has no chat template, so it cannot read a conversation: add "
            f"chat_template.jinja to its tokenizer, or serve its chat variant ({message})"
        )
    return Refused(message)
