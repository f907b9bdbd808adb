"""Continuation of a text whose replica was lost: its request, and the joint of its responses.

The request for the rest has the text so far behind its prompt. Tokens at the joint may be cut in
another way: the rest is as likely as the lost one, and not always the same. No I/O is done here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import orjson

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
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
from gateway.openai_contract import REQUEST, RESPONSE, Endpoint, read_request, serves_openai
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


def generates_text(config: ModelConfig) -> bool:
    """Whether a model has one of the contracts whose texts can be continued."""
    inputs = {each.name for each in config.input}
    outputs = {each.name for each in config.output}
    return (TEXT_INPUT in inputs and TEXT_OUTPUT in outputs) or serves_openai(config)


Joined = InferResponse | None
"""A response for the client, or none."""


class _Form(Protocol):
    """The form of a request and its responses; `read` and `rest` raise NotContinued."""

    def read(self, response: InferResponse) -> tuple[str, bool]:
        """The text of a response, and whether nothing that the client needs follows."""

    def rest(self, text: str, tokens: int) -> InferRequest:
        """The request for the rest of a text, so far of that many tokens."""

    def join(self, response: InferResponse, prompt: int, tokens: int, continued: int) -> Joined:
        """A response of the rest as one of the whole text; None if that has no such response.

        `prompt` and `tokens` are the tokens of the first request, and of the text before the rest.
        """


class SentText:
    """The text that the responses to a request have so far.

    `tokens` is the number of its tokens, `continued` that of its continuations. It `is_complete`
    after its last response.
    """

    def __init__(self, request: InferRequest) -> None:
        self.tokens = self.continued = 0
        self.is_complete = False
        self._form: _Form | None = None
        self._refusal = ""
        self._text = bytearray()
        self._chars = self._prompt_tokens = self._tokens_before = self._unreported = 0
        try:
            self._form = _form(request)
        except (NotContinued, InferenceError) as error:
            self._refuse(error)

    def take(self, response: InferResponse) -> Joined:
        """The next response for the client; None if it gets none. InferenceError: no text."""
        self.is_complete = self.is_complete or response.final
        usage, form = response.usage, self._form
        if usage is not None:
            self.tokens += usage.completion_tokens
            if not self.continued:
                self._prompt_tokens += usage.prompt_tokens
        if form is None:
            return response
        try:
            text, is_last = form.read(response)
            self.is_complete = self.is_complete or is_last
            self._text += text.encode()
            self._chars += len(text)
            return self._joined(form, response) if self.continued else response
        except NotContinued as error:
            self._refuse(error)
        if not self.continued:
            return response
        raise InferenceError(Code.UNAVAILABLE, f"{self.account}; its continuation is no text")

    def rest(self) -> InferRequest:
        """The request for the rest, whose responses follow; raises NotContinued."""
        if self._form is None:
            raise NotContinued(self._refusal)
        if self._chars and not self.tokens:
            raise NotContinued("its responses have no numbers of tokens")
        request = self._form.rest(self._text.decode(), self.tokens)
        self.continued += 1
        self._tokens_before = self.tokens
        return request

    @property
    def account(self) -> str:
        """The number of tokens that were sent; of characters, if those are not known."""
        if self._chars and not self.tokens:
            return f"{self._chars} characters were sent"
        return f"{self.tokens} tokens were sent"

    def _refuse(self, error: Exception) -> None:
        self._form, self._refusal, self._text = None, str(error), bytearray()

    def _joined(self, form: _Form, response: InferResponse) -> Joined:
        joined = form.join(response, self._prompt_tokens, self._tokens_before, self.continued)
        if response.usage is not None:
            self._unreported += response.usage.completion_tokens
        if joined is None:
            return None
        parameters = response.parameters
        if response.final:
            parameters = {**parameters, CONTINUED: self.continued}
        usage = response.usage
        if usage is not None:
            usage = replace(usage, prompt_tokens=0, completion_tokens=self._unreported)
            self._unreported = 0
        return replace(joined, parameters=parameters, usage=usage)


def _form(request: InferRequest) -> _Form:
    """The form of a request that can be continued; raises NotContinued."""
    if request.sequence is not None:
        raise NotContinued("the request belongs to a sequence or a conversation")
    found = read_request(request)
    if found is None:
        return _TextForm(request)
    endpoint, members = found
    if endpoint is Endpoint.CHAT:
        return _ChatForm(request, members)
    if endpoint is Endpoint.COMPLETIONS:
        return _CompletionForm(request, members)
    raise NotContinued(f"the endpoint is '{endpoint}'")


class _TextForm:
    """A text as input, and parts of the text as output."""

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
        return "" if output is None else _decoded(output), False

    def rest(self, text: str, tokens: int) -> InferRequest:
        check_stops(text, stops(self._sampling))
        sampling = dict(self._sampling)
        less(sampling, tokens)
        request, inputs = self._request, []
        for each in request.inputs:
            if each.name == TEXT_INPUT:
                each = replace(each, data=(encoded(_decoded(each) + text),))
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

    def __init__(self, request: InferRequest, members: Mapping[str, Any]) -> None:
        self._request = request
        self._members = members
        self._head: dict[str, Any] = {}
        self._is_last = False
        options = members.get("stream_options")
        self._has_usage = isinstance(options, dict) and bool(options.get("include_usage"))

    def read(self, response: InferResponse) -> tuple[str, bool]:
        output = response.output(RESPONSE)
        if output is None:
            return "", False
        try:
            chunk = _read_chunk(output.elements()[0])
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


def _decoded(tensor: Tensor) -> str:
    """The only text of a tensor."""
    elements = tensor.elements()
    if len(elements) != 1:
        raise NotContinued(f"'{tensor.name}' has {len(elements)} texts")
    try:
        return str(elements[0], "utf-8")
    except UnicodeDecodeError:
        raise NotContinued(f"'{tensor.name}' is not UTF-8") from None


def _object(tensor: Tensor) -> dict[str, Any]:
    try:
        found = orjson.loads(_decoded(tensor))
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
