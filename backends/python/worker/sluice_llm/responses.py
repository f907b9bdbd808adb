"""Responses of one step: tensors, and JSON for OpenAI's clients."""

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .chat import ChatParsers, ChatPiece, ChatReader, ForcedToolReader, PlainReader, delta, message
from .deltas import (
    Decode,
    SequenceDelta,
    TokenLogprobs,
    chat_logprobs,
    completion_logprobs,
    contract_logprobs,
)
from .openai_request import read_body, read_tools, top_logprobs
from .request import Inputs, LlmRequest, Mistake

USAGE = "sluice_usage"
"""The response parameter with prompt tokens, new tokens and the finish reason, for the gateway."""
TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
BLOCKS = {
    "kv_cache_reused_block": "num_reused_blocks",
    "kv_cache_reused_blocks": "num_reused_blocks",
    "kv_cache_missed_block": "num_missed_blocks",
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
}
DRAFTS = ("total_accepted_draft_tokens", "total_draft_tokens")

REQUEST, ENDPOINT, RESPONSE = "openai_request", "openai_endpoint", "openai_response"
CHAT, COMPLETIONS = "chat/completions", "completions"


class TensorResponses:
    """Makes the responses to one request; `batched` models have one more dimension.

    `outputs` are the requested optional ones. `with_logprobs`: the library returns log
    probabilities. `prefix` precedes each text. `counts` is the type of token counts.
    """

    def __init__(
        self,
        outputs: Collection[str],
        decode: Decode,
        *,
        with_logprobs: bool,
        batched: bool,
        counts: Any = np.int32,
    ) -> None:
        self.prefix = ""
        self._outputs = outputs
        self._decode = decode
        self._with_logprobs = with_logprobs
        self._batched = batched
        self._counts = counts
        self._usage_counts = UsageCounts()

    def responses(
        self, deltas: Sequence[SequenceDelta], prompt_tokens: int, *, final: bool
    ) -> list[Any]:
        """One response with the deltas of every sequence."""
        tensors = [self._texts("text_output", [self.prefix + each.text for each in deltas])]
        tensors += self._optional(deltas, prompt_tokens)
        self._usage_counts.add(deltas)
        parameters = self._usage_counts.sent(deltas, prompt_tokens, final=final)
        return [pb_utils.InferenceResponse(tensors, parameters=parameters)]

    def _optional(self, deltas: Sequence[SequenceDelta], prompt_tokens: int) -> list[Any]:
        tensors = [
            self._texts(name, [str(getattr(each, name)) for each in deltas])
            for name in ("finish_reason", "stop_reason")
            if name in self._outputs
        ]
        totals = [each.cumulative_logprob or 0.0 for each in deltas]
        if "cumulative_logprob" in self._outputs:
            tensors.append(self._tensor("cumulative_logprob", totals, np.float32))
        if "log_probs" in self._outputs:
            tensors.append(self._tensor("cum_log_probs", totals, np.float32))
            tensors.append(self._tensor("output_log_probs", _table(deltas), np.float32))
        if "logprobs" in self._outputs:
            tensors.append(self._texts("logprobs", [self._logprobs(each) for each in deltas]))
        if "num_input_tokens" in self._outputs:
            tensors.append(self._tensor("num_input_tokens", [prompt_tokens], self._counts))
        if "num_output_tokens" in self._outputs:
            counts = [each.tokens for each in deltas]
            tensors.append(self._tensor("num_output_tokens", counts, self._counts))
        if "perf_metrics" in self._outputs:
            tensors += self._measured([each.metrics for each in deltas])
        return tensors

    def _logprobs(self, change: SequenceDelta) -> str:
        return contract_logprobs(change.logprobs, self._decode) if self._with_logprobs else "null"

    def _measured(self, metrics: Sequence[Any]) -> list[Any]:
        """The engine's measurements, if they are there."""
        if not metrics or any(each is None for each in metrics):
            return []
        tensors = []
        for name in TIMES:
            times = [getattr(each.timing_metrics, name).total_seconds() * 1e9 for each in metrics]
            tensors.append(self._tensor(f"{name}_ns", times, np.int64))
        for name, member in BLOCKS.items():
            counts = [getattr(each.kv_cache_metrics, member) for each in metrics]
            tensors.append(self._tensor(name, counts, np.int32))
        for name in DRAFTS:
            counts = [getattr(each.speculative_decoding, name) for each in metrics]
            tensors.append(self._tensor(name, counts, np.int32))
        hits = [each.kv_cache_metrics.kv_cache_hit_rate for each in metrics]
        rates = [each.speculative_decoding.acceptance_rate for each in metrics]
        tensors.append(self._tensor("kv_cache_hit_rate", hits, np.float32))
        tensors.append(self._tensor("acceptance_rate", rates, np.float32))
        return tensors

    def _texts(self, name: str, texts: Sequence[str]) -> Any:
        return self._tensor(name, [text.encode() for text in texts], np.object_)

    def _tensor(self, name: str, values: Any, kind: Any) -> Any:
        array = np.array(values, kind)
        return pb_utils.Tensor(name, array[np.newaxis] if self._batched else array)


class UsageCounts:
    """Token counts of one request; the gateway gets each of them once."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sent = 0
        self._prompt_sent = False

    def add(self, deltas: Sequence[SequenceDelta]) -> None:
        """Count the new tokens."""
        self.tokens += sum(each.tokens for each in deltas)

    def sent(
        self, deltas: Sequence[SequenceDelta], prompt_tokens: int, *, final: bool
    ) -> dict[str, str]:
        """The response parameter with all counts that the gateway has not yet."""
        prompt = 0 if self._prompt_sent else prompt_tokens
        new, reason = self.tokens - self._sent, deltas[0].finish_reason if final and deltas else ""
        self._sent, self._prompt_sent = self.tokens, True
        return {USAGE: f"{prompt},{new},{reason or ''}"}


def _table(deltas: Sequence[SequenceDelta]) -> list[list[float]]:
    """One row per sequence, padded with zeros."""
    rows = [[chance.chosen.logprob for chance in each.logprobs] for each in deltas]
    width = max(map(len, rows), default=0)
    return [[*row, *[0.0] * (width - len(row))] for row in rows]


def read_call(
    inputs: Inputs, model: str, adapters: Collection[str], decode: Decode, parsers: ChatParsers
) -> "OpenAiCall":
    """The call in the tensors; Mistake names a wrong input or member."""
    body = inputs.json(REQUEST, dict)
    endpoint = inputs.text(ENDPOINT) or CHAT
    for name in ("text_input", "messages"):
        if name in inputs:
            raise Mistake(f"expected one of the inputs '{name}' and '{REQUEST}', got both")
    inputs.refuse_unread()
    if endpoint not in (CHAT, COMPLETIONS):
        raise Mistake(
            f"this model serves '{CHAT}' and '{COMPLETIONS}', not '{endpoint}'",
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
    _usage_counts: UsageCounts = field(default_factory=UsageCounts)
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
        """The responses for one step; the last one has the token counts for the gateway.

        Tokens without a response, such as the first bytes of a letter, are counted with the next.
        """
        self._usage_counts.add(deltas)
        if self.llm_request.stream:
            answers = self._chunks(deltas)
            if final and self.usage:
                answers.append({**self._head(), "choices": [], "usage": self._usage(prompt_tokens)})
        else:
            choices = [self._choice(each) for each in deltas]
            whole = {**self._head(), "choices": choices, "usage": self._usage(prompt_tokens)}
            answers = [whole]
        if not answers:
            return []
        parameters = self._usage_counts.sent(deltas, prompt_tokens, final=final)
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
            "completion_tokens": self._usage_counts.tokens,
            "total_tokens": prompt_tokens + self._usage_counts.tokens,
        }


Writer = TensorResponses | OpenAiCall


def _response(body: Mapping[str, Any], parameters: Mapping[str, str] | None) -> Any:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    tensor = pb_utils.Tensor(RESPONSE, np.array([text], np.object_))
    return pb_utils.InferenceResponse([tensor], parameters=dict(parameters or {}))
