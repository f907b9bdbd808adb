"""JSON answers to an OpenAI request."""

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .deltas import Chance, Decode, Gain, chat_logprobs, completion_logprobs
from .errors import Refusal
from .messages import delta, message
from .openai_request import read_body, read_tools, top_logprobs
from .outputs import usage
from .parsers import Forced, Parsers, Plain, Reader, Said
from .request import Asked, Inputs

REQUEST, ENDPOINT, RESPONSE = "openai_request", "openai_endpoint", "openai_response"
CHAT, COMPLETIONS = "chat/completions", "completions"


def read_call(
    inputs: Inputs, model: str, adapters: Collection[str], decode: Decode, parsers: Parsers
) -> "OpenAiCall":
    """What the tensors ask for; Refusal says what is wrong with it."""
    body = inputs.json(REQUEST, dict)
    endpoint = inputs.text(ENDPOINT) or CHAT
    for name in ("text_input", "messages"):
        if name in inputs:
            raise Refusal(f"expected one of the inputs '{name}' and '{REQUEST}', got both")
    inputs.refuse_unread()
    if endpoint not in (CHAT, COMPLETIONS):
        raise Refusal(
            f"TensorRT-LLM models serve '{CHAT}' and '{COMPLETIONS}', not '{endpoint}'",
            "UNSUPPORTED",
        )
    chat = endpoint == CHAT
    asked = read_body(body, chat=chat, adapters=adapters)
    options = body.get("stream_options") or {}
    readers: Callable[[], Reader] = Plain
    if chat:
        tools = read_tools(body)
        readers = parsers.readers(tools, asked.template, stream=asked.stream)
        asked = replace(asked, sampling={**asked.sampling, **parsers.sampling(tools)})
    return OpenAiCall(
        asked=asked,
        chat=chat,
        model=body.get("model") or model,
        decode=decode,
        readers=readers,
        top=top_logprobs(body, chat=chat),
        usage=bool(options.get("include_usage")) or not asked.stream,
        prefix=(asked.text or "") if asked.echo else "",
    )


@dataclass
class OpenAiCall:
    """One request while it is answered: a chunk for each gain, or all at once at the end.

    `usage` says whether the client is told of tokens, `prefix` is what an echo begins with. `top`
    is how many of the likeliest tokens come with log probabilities, None if there are none;
    `readers` make what reads the text of each choice.
    """

    asked: Asked
    chat: bool
    model: str
    usage: bool
    decode: Decode
    readers: Callable[[], Reader]
    top: int | None = None
    prefix: str = ""
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    _letters: dict[int, int] = field(default_factory=dict)
    _tokens: int = 0
    _reading: dict[int, Reader] = field(default_factory=dict)
    _callers: set[int] = field(default_factory=set)

    def within(self, limit: int | None, prompt: Sequence[int] | None) -> Asked:
        """What is asked for; a chat without a limit of its own may fill the context."""
        if limit is None or prompt is None or "max_tokens" in self.asked.sampling:
            return self.asked
        room = max(1, limit - len(prompt))
        return replace(self.asked, sampling={**self.asked.sampling, "max_tokens": room})

    def responses(self, gains: Sequence[Gain], prompt_tokens: int, *, final: bool) -> list[Any]:
        """The responses for one step; the last one also tells the gateway of the tokens."""
        first = not self._tokens
        self._tokens += sum(each.tokens for each in gains)
        if self.asked.stream:
            answers = self._chunks(gains)
            if final and self.usage:
                answers.append({**self._head(), "choices": [], "usage": self._usage(prompt_tokens)})
        else:
            choices = [self._choice(each) for each in gains]
            whole = {**self._head(), "choices": choices, "usage": self._usage(prompt_tokens)}
            answers = [whole]
        told = usage(gains, prompt_tokens if first else 0, final=final)
        last = len(answers) - 1
        return [_response(each, told if n == last else None) for n, each in enumerate(answers)]

    def _chunks(self, gains: Sequence[Gain]) -> list[dict[str, Any]]:
        chunks = []
        for gain in gains:
            if gain.index not in self._begun:
                self._begun.add(gain.index)
                chunks += self._beginning(gain.index)
            # A sequence that has nothing new has no chunk, unless it has ended.
            said, logprobs = self._said(gain), self._logprobs(gain.index, gain.logprobs)
            if said != Said() or gain.finish_reason or logprobs:
                chunks.append(self._chunk(gain.index, said, self._reason(gain), logprobs))
        return chunks

    def _beginning(self, index: int) -> list[dict[str, Any]]:
        if self.chat:
            delta = {"role": "assistant", "content": ""}
            return [self._with_choice({"index": index, "delta": delta, "finish_reason": None})]
        return [self._chunk(index, Said(self.prefix), None)] if self.prefix else []

    def _chunk(
        self, index: int, said: Said, reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        told = {"delta": delta(said)} if self.chat else {"text": said.content}
        rest = {"logprobs": logprobs, "finish_reason": reason}
        return self._with_choice({"index": index, **told, **rest})

    def _with_choice(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(), "choices": [choice]}
        return {**chunk, "usage": None} if self.usage else chunk

    def _choice(self, gain: Gain) -> dict[str, Any]:
        said = self._said(gain)
        told = {"message": message(said)} if self.chat else {"text": self.prefix + said.content}
        rest = {"logprobs": self._logprobs(gain.index, gain.logprobs)}
        return {"index": gain.index, **told, **rest, "finish_reason": self._reason(gain)}

    def _said(self, gain: Gain) -> Said:
        reader = self._reading.get(gain.index)
        if reader is None:
            reader = self._reading[gain.index] = self.readers()
        said = reader.read(gain.text, final=bool(gain.finish_reason))
        # Whoever names the function knows that it is called.
        if said.calls and not isinstance(reader, Forced):
            self._callers.add(gain.index)
        return said

    def _reason(self, gain: Gain) -> str | None:
        calls = gain.finish_reason == "stop" and gain.index in self._callers
        return "tool_calls" if calls else gain.finish_reason

    def _logprobs(self, index: int, found: Sequence[Chance]) -> dict[str, Any] | None:
        """Those of new tokens, None where nobody asked or nothing is new."""
        if self.top is None or not found:
            return None
        if self.chat:
            return chat_logprobs(found, self.top, self.decode)
        told = completion_logprobs(found, self.top, self.decode, self._letters.get(index, 0))
        self._letters[index] = told["text_offset"][-1] + len(told["tokens"][-1])
        return told

    def _head(self) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if self.asked.stream else "chat.completion"
        identity = f"{'chatcmpl' if self.chat else 'cmpl'}-{self._id}"
        return {"id": identity, "object": kind, "created": self._created, "model": self.model}

    def _usage(self, prompt_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": prompt_tokens + self._tokens,
        }


def _response(body: Mapping[str, Any], parameters: Mapping[str, str] | None) -> Any:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    tensor = pb_utils.Tensor(RESPONSE, np.array([text], np.object_))
    return pb_utils.InferenceResponse([tensor], parameters=dict(parameters or {}))
