"""What does the chat need of a server, and how does it say what went wrong there?"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MESSAGES = "messages"
TEXT_OUTPUT = "text_output"
STREAM = "stream"
SAMPLING_PARAMETERS = "sampling_parameters"
NUM_OUTPUT_TOKENS = "num_output_tokens"
FINISH_REASON = "finish_reason"
ASKED_FOR = (NUM_OUTPUT_TOKENS, FINISH_REASON)
"""Outputs that an LLM gives when its input `return_*` says so."""

READY = "READY"
VLLM = "vllm"
UNTIL_THE_CONTEXT_ENDS: Mapping[str, Any] = {"max_tokens": None}
"""vLLM would end an answer after 16 tokens if it were told nothing."""

INT64 = range(-(2**63), 2**63)
NO_TEMPLATE = re.compile(r"(no|provide a|without a) chat template", re.IGNORECASE)


class ChatError(Exception):
    """The chat cannot do what it was asked; the message is one line, with the fix."""


class ServerGone(ChatError):
    """Nobody answers there, or no longer."""


class Refused(ChatError):
    """The server or the model says no; the message is what it says."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One version of a model in the server's index."""

    name: str
    state: str
    reason: str

    @property
    def ready(self) -> bool:
        """Whether it can be asked."""
        return self.state == READY


@dataclass(frozen=True, slots=True)
class ChatModel:
    """What a server tells of a model: its inputs with their ranks, and its outputs."""

    name: str
    platform: str
    inputs: Mapping[str, int]
    outputs: frozenset[str]

    @property
    def chats(self) -> bool:
        """Whether it takes a conversation and answers with text."""
        return MESSAGES in self.inputs and TEXT_OUTPUT in self.outputs


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that a model is asked to go on with, and how it shall sample."""

    model: ChatModel
    messages: Sequence[Mapping[str, str]]
    sampling: Mapping[str, Any]

    def inputs(self) -> Mapping[str, str | bool]:
        """The inputs by name, as far as the model has them; JSON is text.

        Refused if something is no text that JSON can hold.
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
        """The request's parameters: the sampling, for a model without an input for it.

        Refused if a value is none that a parameter can have.
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
        """Bytes of a terminal or a command line that are no characters have become surrogates."""
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
class Part:
    """One response: text that was added, how many tokens it has, and why it is the last.

    `tokens` is None if the model does not count, `finish_reason` "" if it says none.
    """

    text: str
    tokens: int | None = None
    finish_reason: str = ""


class ChatServer(ABC):
    """A server by one of its wires. Every method raises ServerGone and Refused."""

    url: str

    @abstractmethod
    async def models(self) -> Sequence[Listed] | None:
        """Its index, one row for each version; None if it has none."""

    @abstractmethod
    async def describe(self, name: str) -> ChatModel:
        """What it tells of a model that is ready."""

    @abstractmethod
    def answer(self, question: Question) -> AsyncGenerator[Part, None]:
        """The parts of an answer, as they come. Leaving it cancels the request."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the connection."""


def refusal(model: str, message: str) -> Refused:
    """What a model answered instead of an answer; with the fix, where the server cannot know it."""
    if NO_TEMPLATE.search(message):
        return Refused(
            f"model '{model}' has no chat template, so it cannot read a conversation: add "
            f"chat_template.jinja to its tokenizer, or serve its chat variant ({message})"
        )
    return Refused(message)
