"""The forms of requests whose texts can be continued, and of their responses."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import orjson

from gateway.fleet.continuable import SAMPLING, NotContinued, check, check_stops, less, stops
from gateway.generation import (
    EXCLUDE_INPUT,
    NOT_SAMPLING,
    SAMPLING_PARAMETERS,
    STREAM,
    TEXT_INPUT,
    TEXT_OUTPUT,
)
from gateway.messages import InferRequest, InferResponse
from gateway.openai_contract import REQUEST, RESPONSE, Endpoint, read_request
from gateway.tensor import Tensor, encoded

CONTINUED = "continued"
"""The parameter of the last response, and the member of the last chunk of OpenAI's API."""
INPUT_TOKENS = "num_input_tokens"
TEXT_INPUTS = frozenset(
    {
        *(TEXT_INPUT, STREAM, SAMPLING_PARAMETERS, EXCLUDE_INPUT),
        *("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"),
    }
)
"""Inputs with the same effect on the rest; without log probabilities, images and conversations."""
TEMPLATE_OPTIONS = "chat_template_kwargs"
TEXT_PARAMETERS = SAMPLING | NOT_SAMPLING | {"lora_name"}
MEMBERS = SAMPLING | {
    *("add_special_tokens", "cache_salt", "metadata", "model", "priority", "prompt_cache_key"),
    *("request_id", "safety_identifier", "service_tier", "store", "stream", "stream_options"),
    "user",
}
CHAT_MEMBERS = MEMBERS | {
    *("chat_template", TEMPLATE_OPTIONS, "continue_final_message", "messages"),
    *("max_completion_tokens", "parallel_tool_calls"),
}
COMPLETION_MEMBERS = MEMBERS | {"prompt"}
COMPLETION_TOKENS = 16
"""The limit of a completion whose request has none, in OpenAI's API."""
REASONING = ("<think>", "</think>")

Joined = InferResponse | None
"""A response for the client, or none."""


class TextForm(Protocol):
    """The form of a request and its responses; `read` and `rest` raise NotContinued."""

    output: str
    """The output with the text."""

    def read(self, response: InferResponse) -> tuple[str, bool]:
        """The text of a response, and whether nothing that the client needs follows."""

    def read_element(self, element: bytes) -> tuple[str, bool]:
        """As `read` of a response with this element of the output only."""

    def rest(self, text: str, tokens: int) -> InferRequest:
        """The request for the rest of a text, so far of that many tokens."""

    def join(self, response: InferResponse, prompt: int, tokens: int, continued: int) -> Joined:
        """A response of the rest as one of the whole text; None if that has no such response.

        `prompt` and `tokens` are the tokens of the first request, and of the text before the rest.
        """


def form_of(request: InferRequest) -> TextForm:
    """The form of a request that can be continued; raises NotContinued."""
    if request.sequence is not None:
        raise NotContinued("the request belongs to a sequence or a conversation")
    found = read_request(request)
    if found is None:
        return _PlainForm(request)
    endpoint, members = found
    if endpoint is Endpoint.CHAT:
        return _ChatForm(request, members)
    if endpoint is Endpoint.COMPLETIONS:
        return _CompletionForm(request, members)
    raise NotContinued(f"the endpoint is '{endpoint}'")


class _PlainForm:
    """A text as input, and parts of the text as output."""

    output = TEXT_OUTPUT

    def __init__(self, request: InferRequest) -> None:
        for each in request.inputs:
            if each.name not in TEXT_INPUTS:
                raise NotContinued(f"the request has the input '{each.name}'")
        self._request = request
        self._sampling: dict[str, Any] = dict(request.parameters)
        self._input_tokens: Tensor | None = None
        self._has_begun = False
        given = request.input(SAMPLING_PARAMETERS)
        if given is not None:
            self._sampling = _object(given)
        check(self._sampling, TEXT_PARAMETERS)
        if self._sampling.get("max_tokens") is None:
            raise NotContinued("the request has no 'max_tokens'")

    def read(self, response: InferResponse) -> tuple[str, bool]:
        if not self._has_begun:
            self._has_begun = True
            self._input_tokens = response.output(INPUT_TOKENS)
        output = response.output(TEXT_OUTPUT)
        return ("", False) if output is None else self.read_element(_only(output))

    def read_element(self, element: bytes) -> tuple[str, bool]:
        return _decoded(element, TEXT_OUTPUT), False

    def rest(self, text: str, tokens: int) -> InferRequest:
        check_stops(text, stops(self._sampling))
        sampling = dict(self._sampling)
        less(sampling, tokens)
        request, inputs = self._request, []
        for each in request.inputs:
            if each.name == TEXT_INPUT:
                each = replace(each, data=(encoded(_decoded(_only(each), TEXT_INPUT) + text),))
            elif each.name == SAMPLING_PARAMETERS:
                each = replace(each, data=(orjson.dumps(sampling),))
            inputs.append(each)
        parameters = sampling
        if request.input(SAMPLING_PARAMETERS) is not None:
            parameters = dict(request.parameters)
        return replace(request, inputs=tuple(inputs), parameters=parameters)

    def join(self, response: InferResponse, prompt: int, tokens: int, continued: int) -> Joined:
        known = self._input_tokens
        if known is None:
            return response
        outputs = [known if each.name == INPUT_TOKENS else each for each in response.outputs]
        return replace(response, outputs=tuple(outputs))


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    role: str | None = None
    content: str | None = None
    function_call: None = None
    reasoning: None = None
    reasoning_content: None = None
    refusal: None = None
    tool_calls: None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    id: str
    created: int
    choices: tuple[_Choice, ...]
    usage: _Usage | None = None


_read_chunk = msgspec.json.Decoder(_Chunk).decode


class _OpenAiForm:
    """A body of OpenAI's API as input, and chunks as output."""

    output = RESPONSE

    def __init__(self, request: InferRequest, members: Mapping[str, Any]) -> None:
        self._request = request
        self._members = members
        self._head: dict[str, Any] = {}
        self._is_last = False
        options = members.get("stream_options")
        self._has_usage = isinstance(options, dict) and bool(options.get("include_usage"))

    def read(self, response: InferResponse) -> tuple[str, bool]:
        output = response.output(RESPONSE)
        return ("", False) if output is None else self.read_element(output.elements()[0])

    def read_element(self, element: bytes) -> tuple[str, bool]:
        try:
            chunk = _read_chunk(element)
        except msgspec.DecodeError:
            raise NotContinued("a chunk has more than a text") from None
        self._head = self._head or {"id": chunk.id, "created": chunk.created}
        text = ""
        for each in chunk.choices:
            text += each.text or (each.delta and each.delta.content) or ""
            self._is_last = self._is_last or each.finish_reason is not None
        return text, self._is_last and not self._has_usage

    def join(self, response: InferResponse, prompt: int, tokens: int, continued: int) -> Joined:
        output = response.output(RESPONSE)
        if output is None:
            return response
        chunk = orjson.loads(output.elements()[0]) | self._head
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            if delta.pop("role", None) and not delta.get("content"):
                return None  # the client has had the role
            if choice.get("finish_reason") is not None:
                chunk[CONTINUED] = continued
        if chunk.get("usage"):
            _add(chunk["usage"], prompt, tokens)
        outputs = (replace(output, data=(orjson.dumps(chunk),)),)
        return replace(response, outputs=outputs)

    def _lessened(self, text: str, tokens: int) -> dict[str, Any]:
        """The members with the limits of the rest."""
        if self._is_last:
            raise NotContinued("only its usage is missing")
        check_stops(text, stops(self._members))
        members = dict(self._members)
        less(members, tokens)
        return members

    def _body(self, members: dict[str, Any]) -> InferRequest:
        inputs = [
            replace(each, data=(orjson.dumps(members),)) if each.name == REQUEST else each
            for each in self._request.inputs
        ]
        return replace(self._request, inputs=tuple(inputs))


class _CompletionForm(_OpenAiForm):
    def __init__(self, request: InferRequest, members: Mapping[str, Any]) -> None:
        super().__init__(request, {"max_tokens": COMPLETION_TOKENS, **members})
        check(members, COMPLETION_MEMBERS)
        if not isinstance(members.get("prompt"), str):
            raise NotContinued("its prompt is no single text")

    def rest(self, text: str, tokens: int) -> InferRequest:
        members = self._lessened(text, tokens)
        members["prompt"] += text
        return self._body(members)


class _ChatForm(_OpenAiForm):
    def __init__(self, request: InferRequest, members: Mapping[str, Any]) -> None:
        super().__init__(request, members)
        self._is_begun = bool(members.get("continue_final_message"))
        check(members, CHAT_MEMBERS | ({"add_generation_prompt"} if self._is_begun else set()))
        options = members.get(TEMPLATE_OPTIONS)
        if options and (not isinstance(options, dict) or any(options.values())):
            raise NotContinued(f"its '{TEMPLATE_OPTIONS}' may begin a reasoning")
        messages = members.get("messages") or None
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise NotContinued("its messages are no conversation")
        self._messages = messages
        if self._is_begun and not isinstance(messages[-1].get("content"), str):
            raise NotContinued("its last message is no text")

    def rest(self, text: str, tokens: int) -> InferRequest:
        members = self._lessened(text, tokens)
        if any(each in text for each in REASONING):
            raise NotContinued("its text has reasoning")
        if text[-1:].isspace():
            raise NotContinued("its text ends with white space, which chat templates may remove")
        if text:
            *before, last = self._messages
            if self._is_begun:
                messages = [*before, {**last, "content": last["content"] + text}]
            else:
                messages = [*before, last, {"role": "assistant", "content": text}]
            members["messages"] = messages
            members |= {"continue_final_message": True, "add_generation_prompt": False}
        return self._body(members)


def _only(tensor: Tensor) -> bytes:
    """The only text of a tensor."""
    elements = tensor.elements()
    if len(elements) != 1:
        raise NotContinued(f"'{tensor.name}' has {len(elements)} texts")
    return elements[0]


def _decoded(element: bytes, name: str) -> str:
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError:
        raise NotContinued(f"'{name}' is not UTF-8") from None


def _object(tensor: Tensor) -> dict[str, Any]:
    try:
        found = orjson.loads(_decoded(_only(tensor), tensor.name))
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise NotContinued(f"'{tensor.name}' is no JSON object")
    return found


def _add(usage: dict[str, Any], prompt: int, tokens: int) -> None:
    """Turn the usage of a rest into that of the whole text."""
    usage["prompt_tokens"] = prompt or usage["prompt_tokens"]
    usage["completion_tokens"] += tokens
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    usage.pop("prompt_tokens_details", None)
