"""JSON answers to an OpenAI request."""

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .deltas import Decode, SequenceDelta, TokenLogprobs, chat_logprobs, completion_logprobs
from .errors import Refusal
from .messages import delta, message
from .openai_request import read_body, read_tools, top_logprobs
from .outputs import usage
from .parsers import ChatPiece, ChatReader, ForcedToolReader, Parsers, PlainReader
from .request import Inputs, LlmRequest

REQUEST, ENDPOINT, RESPONSE = "openai_request", "openai_endpoint", "openai_response"
CHAT, COMPLETIONS = "chat/completions", "completions"


def read_call(
    inputs: Inputs, model: str, adapters: Collection[str], decode: Decode, parsers: Parsers
) -> "OpenAiCall":
    """The call in the tensors; Refusal names a wrong input or member."""
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
    llm_request = read_body(body, chat=chat, adapters=adapters)
    options = body.get("stream_options") or {}
    readers: Callable[[], ChatReader] = PlainReader
    if chat:
        tools = read_tools(body)
        readers = parsers.readers(tools, llm_request.template, stream=llm_request.stream)
        llm_request = replace(
            llm_request, sampling={**llm_request.sampling, **parsers.sampling(tools)}
        )
    return OpenAiCall(
        llm_request=llm_request,
        chat=chat,
        model=body.get("model") or model,
        decode=decode,
        readers=readers,
        top=top_logprobs(body, chat=chat),
        usage=bool(options.get("include_usage")) or not llm_request.stream,
        prefix=(llm_request.text or "") if llm_request.echo else "",
    )


@dataclass
class OpenAiCall:
    """The answer to one request: a chunk for each delta, or one body at the end.

    `usage`: the client gets token counts. `prefix`: the beginning of an echo. `top`: the number of
    likeliest tokens with log probabilities, None without any. `readers` makes a reader of the text
    of each choice.
    """

    llm_request: LlmRequest
    chat: bool
    model: str
    usage: bool
    decode: Decode
    readers: Callable[[], ChatReader]
    top: int | None = None
    prefix: str = ""
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    _letters: dict[int, int] = field(default_factory=dict)
    _tokens: int = 0
    _reading: dict[int, ChatReader] = field(default_factory=dict)
    _callers: set[int] = field(default_factory=set)

    def within(self, limit: int | None, prompt: Sequence[int] | None) -> LlmRequest:
        """The request for the engine; a chat without a limit may fill the context."""
        if limit is None or prompt is None or "max_tokens" in self.llm_request.sampling:
            return self.llm_request
        room = max(1, limit - len(prompt))
        return replace(self.llm_request, sampling={**self.llm_request.sampling, "max_tokens": room})

    def responses(
        self, deltas: Sequence[SequenceDelta], prompt_tokens: int, *, final: bool
    ) -> list[Any]:
        """The responses for one step; the last one has the token counts for the gateway."""
        first = not self._tokens
        self._tokens += sum(each.tokens for each in deltas)
        if self.llm_request.stream:
            answers = self._chunks(deltas)
            if final and self.usage:
                answers.append({**self._head(), "choices": [], "usage": self._usage(prompt_tokens)})
        else:
            choices = [self._choice(each) for each in deltas]
            whole = {**self._head(), "choices": choices, "usage": self._usage(prompt_tokens)}
            answers = [whole]
        parameters = usage(deltas, prompt_tokens if first else 0, final=final)
        last = len(answers) - 1
        return [
            _response(each, parameters if n == last else None) for n, each in enumerate(answers)
        ]

    def _chunks(self, deltas: Sequence[SequenceDelta]) -> list[dict[str, Any]]:
        chunks = []
        for change in deltas:
            if change.index not in self._begun:
                self._begun.add(change.index)
                chunks += self._beginning(change.index)
            # A sequence without anything new has no chunk, unless it has ended.
            said, logprobs = self._said(change), self._logprobs(change.index, change.logprobs)
            if said != ChatPiece() or change.finish_reason or logprobs:
                chunks.append(self._chunk(change.index, said, self._reason(change), logprobs))
        return chunks

    def _beginning(self, index: int) -> list[dict[str, Any]]:
        if self.chat:
            delta = {"role": "assistant", "content": ""}
            return [self._with_choice({"index": index, "delta": delta, "finish_reason": None})]
        return [self._chunk(index, ChatPiece(self.prefix), None)] if self.prefix else []

    def _chunk(
        self, index: int, said: ChatPiece, reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        content = {"delta": delta(said)} if self.chat else {"text": said.content}
        rest = {"logprobs": logprobs, "finish_reason": reason}
        return self._with_choice({"index": index, **content, **rest})

    def _with_choice(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(), "choices": [choice]}
        return {**chunk, "usage": None} if self.usage else chunk

    def _choice(self, change: SequenceDelta) -> dict[str, Any]:
        said = self._said(change)
        content = {"message": message(said)} if self.chat else {"text": self.prefix + said.content}
        rest = {"logprobs": self._logprobs(change.index, change.logprobs)}
        return {"index": change.index, **content, **rest, "finish_reason": self._reason(change)}

    def _said(self, change: SequenceDelta) -> ChatPiece:
        reader = self._reading.get(change.index)
        if reader is None:
            reader = self._reading[change.index] = self.readers()
        said = reader.read(change.text, final=bool(change.finish_reason))
        # A client that names the function expects its call.
        if said.calls and not isinstance(reader, ForcedToolReader):
            self._callers.add(change.index)
        return said

    def _reason(self, change: SequenceDelta) -> str | None:
        calls = change.finish_reason == "stop" and change.index in self._callers
        return "tool_calls" if calls else change.finish_reason

    def _logprobs(self, index: int, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """Those of new tokens; None if not requested or if there are no new tokens."""
        if self.top is None or not found:
            return None
        if self.chat:
            return chat_logprobs(found, self.top, self.decode)
        logprobs = completion_logprobs(found, self.top, self.decode, self._letters.get(index, 0))
        self._letters[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        return logprobs

    def _head(self) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if self.llm_request.stream else "chat.completion"
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
