"""The text contract of LLM models: prompt and sampling in, text and finish reason out.

Names and meanings are those of Triton's vLLM backend, plus the input `messages`, and plus whole
OpenAI requests, which `openai_contract.py` reads. No runtime is used here: a backend reads a
`GenerationRequest`, and passes the text that its engine adds to a `Transcript`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import orjson

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Sink, Usage
from gateway.openai_contract import ENDPOINT, REQUEST, RESPONSE, serves_openai
from gateway.tensor import Datatype, Tensor, array_tensor, encoded, text_tensor

TEXT_INPUT = "text_input"
MESSAGES = "messages"
IMAGE = "image"
STREAM = "stream"
SAMPLING_PARAMETERS = "sampling_parameters"
EXCLUDE_INPUT = "exclude_input_in_output"
EMBEDDING_REQUEST = "embedding_request"
TEXT_OUTPUT = "text_output"

NOT_SAMPLING = frozenset({"id"})
"""Request parameters of HTTP generate that are no sampling parameters."""


def generates_text(config: ModelConfig) -> bool:
    """Whether a model has one of the contracts of texts: prompt in and text out, or OpenAI's."""
    inputs = {each.name for each in config.input}
    outputs = {each.name for each in config.output}
    return (TEXT_INPUT in inputs and TEXT_OUTPUT in outputs) or serves_openai(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalOutputs:
    """The requested optional outputs; each has an input `return_*`."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False


NO_OPTIONAL_OUTPUTS = OptionalOutputs()
_RETURN = {f"return_{each.name}": each.name for each in fields(OptionalOutputs)}

INPUTS = (
    *(
        ModelInput(name=name, data_type=DataType.TYPE_STRING, dims=dims, optional=True)
        for name, dims in (
            (TEXT_INPUT, (1,)),
            (MESSAGES, (1,)),
            (IMAGE, (-1,)),
            (SAMPLING_PARAMETERS, (1,)),
            (EMBEDDING_REQUEST, (1,)),
            (REQUEST, (1,)),
            (ENDPOINT, (1,)),
        )
    ),
    *(
        ModelInput(name=name, data_type=DataType.TYPE_BOOL, dims=(1,), optional=True)
        for name in (STREAM, EXCLUDE_INPUT, *_RETURN)
    ),
)
"""The inputs of an LLM model. All are optional: any of four can carry the prompt."""

OUTPUTS = (
    ModelOutput(name=TEXT_OUTPUT, data_type=DataType.TYPE_STRING, dims=(-1,)),
    ModelOutput(name="finish_reason", data_type=DataType.TYPE_STRING, dims=(-1,)),
    ModelOutput(name="cumulative_logprob", data_type=DataType.TYPE_FP32, dims=(-1,)),
    ModelOutput(name="logprobs", data_type=DataType.TYPE_STRING, dims=(-1,)),
    ModelOutput(name="num_input_tokens", data_type=DataType.TYPE_UINT32, dims=(1,)),
    ModelOutput(name="num_output_tokens", data_type=DataType.TYPE_UINT32, dims=(-1,)),
    ModelOutput(name=RESPONSE, data_type=DataType.TYPE_STRING, dims=(1,)),
)
"""The outputs of an LLM model; all but the first are returned on request only.

A request in OpenAI's form gets the last one only.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to an LLM.

    Exactly one of `text`, `messages` and `embedding` is set. `images` are base64 texts. `echo`
    puts the prompt before the completion. `sampling` has the client's names and values; the
    backend validates them.
    """

    text: str | None = None
    messages: list[Any] | None = None
    embedding: Mapping[str, Any] | None = None
    images: tuple[bytes, ...] = ()
    stream: bool = False
    echo: bool = False
    optional: OptionalOutputs = NO_OPTIONAL_OUTPUTS
    sampling: Mapping[str, Any] = field(default_factory=dict)


def read_generation(request: InferRequest) -> GenerationRequest:
    """Read a request's inputs and parameters; INVALID_ARG if they are invalid."""
    reader = _Reader(request)
    embedding = reader.json(EMBEDDING_REQUEST, dict)
    text, messages = reader.text(TEXT_INPUT), reader.json(MESSAGES, list)
    if embedding is not None:
        text = messages = None
    elif (text is None) == (messages is None):
        found = "neither" if text is None else "both"
        raise invalid(f"expected one of the inputs '{TEXT_INPUT}' and '{MESSAGES}', got {found}")
    stream, exclude = reader.flag(STREAM) is True, reader.flag(EXCLUDE_INPUT)
    if stream and exclude is False:
        raise invalid("When streaming, `exclude_input_in_output` = False is not allowed.")
    return GenerationRequest(
        text=text,
        messages=messages,
        embedding=embedding,
        images=reader.elements(IMAGE),
        stream=stream,
        # A conversation is echoed only on demand: its text is the template's, not the client's.
        echo=not stream and (text is not None if exclude is None else not exclude),
        optional=reader.optional_outputs(),
        sampling=reader.sampling(),
    )


class _Reader:
    """The values of one request, by the names of its inputs."""

    def __init__(self, request: InferRequest) -> None:
        self._inputs = {tensor.name: tensor for tensor in request.inputs}
        self._parameters = request.parameters

    def elements(self, name: str) -> tuple[bytes, ...]:
        tensor = self._inputs.get(name)
        return () if tensor is None else tensor.elements()

    def text(self, name: str) -> str | None:
        if name not in self._inputs:
            return None
        try:
            return str(self._only(name, self.elements(name)), "utf-8")
        except UnicodeDecodeError as error:
            raise invalid(
                f"input '{name}' is not valid UTF-8: {error.reason} at byte {error.start}"
            ) from None

    def json(self, name: str, kind: type) -> Any:
        if name not in self._inputs:
            return None
        try:
            value = orjson.loads(self._only(name, self.elements(name)))
        except orjson.JSONDecodeError as error:
            raise invalid(f"input '{name}' is not valid JSON: {error}") from None
        if not isinstance(value, kind):
            expected = "a list" if kind is list else "an object"
            raise invalid(f"input '{name}' is JSON, but {expected} is expected in it")
        return value

    def flag(self, name: str) -> bool | None:
        tensor = self._inputs.get(name)
        return None if tensor is None else bool(self._only(name, memoryview(tensor.raw())))

    def optional_outputs(self) -> OptionalOutputs:
        asked = {field: True for name, field in _RETURN.items() if self.flag(name)}
        return OptionalOutputs(**asked) if asked else NO_OPTIONAL_OUTPUTS

    def sampling(self) -> Mapping[str, Any]:
        """The JSON of `sampling_parameters`, which replaces the request's parameters."""
        sampling: dict[str, Any] | None = self.json(SAMPLING_PARAMETERS, dict)
        if sampling is not None:
            return sampling
        return {k: v for k, v in self._parameters.items() if k not in NOT_SAMPLING}

    def _only(self, name: str, elements: Sequence[Any]) -> Any:
        if len(elements) != 1:
            raise invalid(f"input '{name}' has {len(elements)} elements, expected 1")
        return elements[0]


def invalid(message: str) -> InferenceError:
    """The error for a client's mistake."""
    return InferenceError(Code.INVALID_ARG, message)


@dataclass(frozen=True, slots=True)
class Delta:
    """The text and tokens that one sequence adds to the last response.

    `cumulative_logprob` is the running total; `logprobs` is JSON, a list with one object per new
    token, or `null` if they were not requested.
    """

    text: str
    tokens: int
    index: int = 0
    finish_reason: str | None = None
    cumulative_logprob: float | None = None
    logprobs: str = "null"


class Transcript:
    """Converts the deltas of an engine to the responses of one request.

    `count` is the number of sequences, `prompt` the text that an echo puts before each.
    """

    def __init__(self, request: GenerationRequest, count: int = 1, prompt: str = "") -> None:
        self._optional = request.optional
        self._prefix = prompt if request.echo else ""
        self._latest = {index: Delta("", 0, index) for index in range(count)}
        self._prompt_counted = False
        self.is_of_one_text = (
            request.stream
            and count == 1
            and not (request.optional.logprobs or request.optional.cumulative_logprob)
        )
        """Whether each response has a new part of one text, and no log probability."""

    def respond(
        self,
        deltas: Sequence[Delta],
        prompt_tokens: int,
        *,
        final: bool,
        cached_tokens: int | None = None,
    ) -> InferResponse:
        """One response with the deltas; sequences without a delta get an empty text."""
        row = deltas if len(deltas) == len(self._latest) == 1 else self._row(deltas)
        outputs: tuple[Tensor, ...] = (
            text_tensor(TEXT_OUTPUT, [self._prefix + delta.text for delta in row]),
        )
        if self._optional is not NO_OPTIONAL_OUTPUTS:
            outputs += optional_tensors(self._optional, row, prompt_tokens)
        usage = Usage(
            prompt_tokens=0 if self._prompt_counted else prompt_tokens,
            completion_tokens=row[0].tokens if row is deltas else sum(d.tokens for d in deltas),
            finish_reason=(row[0].finish_reason or "") if final else "",
            cached_tokens=None if self._prompt_counted else cached_tokens,
        )
        self._prompt_counted = True
        return InferResponse(outputs=outputs, final=final, usage=usage)

    def deliver(self, sink: Sink, prompt_tokens: int, text: str, tokens: int) -> None:
        """Put a part that is not the last one of the only text, as `respond` makes it."""
        if self._optional is NO_OPTIONAL_OUTPUTS and self._prompt_counted:
            sink.put_texts(TEXT_OUTPUT, (encoded(self._prefix + text),), (tokens,))
        else:
            sink.put(self.respond((Delta(text, tokens),), prompt_tokens, final=False))

    def _row(self, deltas: Sequence[Delta]) -> list[Delta]:
        """One delta per sequence, in the order of their indices."""
        for index, last in self._latest.items():
            nothing = "null" if last.logprobs == "null" else "[]"
            self._latest[index] = Delta(
                "", 0, index, last.finish_reason, last.cumulative_logprob, nothing
            )
        self._latest.update((delta.index, delta) for delta in deltas)
        return list(self._latest.values())


def optional_tensors(
    optional: OptionalOutputs, row: Sequence[Delta], prompt_tokens: int
) -> tuple[Tensor, ...]:
    """The requested optional outputs, one element per sequence."""

    tensors: list[Tensor] = []
    if optional.finish_reason:
        tensors.append(text_tensor("finish_reason", [str(d.finish_reason) for d in row]))
    if optional.cumulative_logprob:
        totals = np.array([d.cumulative_logprob or 0.0 for d in row], dtype=np.float32)
        tensors.append(array_tensor("cumulative_logprob", Datatype.FP32, totals))
    if optional.logprobs:
        tensors.append(text_tensor("logprobs", [d.logprobs for d in row]))
    if optional.num_input_tokens:
        tensors.append(_counts("num_input_tokens", [prompt_tokens]))
    if optional.num_output_tokens:
        tensors.append(_counts("num_output_tokens", [d.tokens for d in row]))
    return tuple(tensors)


def _counts(name: str, counts: Sequence[int]) -> Tensor:
    return array_tensor(name, Datatype.UINT32, np.array(counts, dtype=np.uint32))
