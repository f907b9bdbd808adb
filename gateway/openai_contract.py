"""OpenAI's requests as tensors: any backend can serve them, and every frontend carry them.

A model has the contract if it declares the input `openai_request` and the output
`openai_response`, both BYTES [1]. Into the first goes the body of a request as JSON, and into
`openai_endpoint`, which it may declare too, what it is for. Each response has one JSON text in
`openai_response`: the whole answer, or if the body has `"stream": true` a chunk, byte by byte what
OpenAI's stream has behind `data: `; its `[DONE]` is said by the final flag instead. The parameter
`openai_event` of a response names the event, where the endpoint names them (`responses`).
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import orjson

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.tensor import Datatype, Tensor

REQUEST = "openai_request"
ENDPOINT = "openai_endpoint"
RESPONSE = "openai_response"
EVENT = "openai_event"
"""The response parameter with the name of the event."""
NAMES = "openai_names"
"""The config parameter with a JSON list of further names that clients may put into `model`."""


class Endpoint(StrEnum):
    """What a request is for: its path behind `/v1/`."""

    CHAT = "chat/completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    SCORE = "score"
    RERANK = "rerank"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


class OpenAiRefusal(InferenceError):
    """A refusal that the model has written in OpenAI's form: HTTP status, and JSON of the error.

    To every frontend but OpenAI's it is an error as any other.
    """

    def __init__(self, code: Code, message: str, *, status: int, body: bytes) -> None:
        super().__init__(code, message)
        self.status = status
        self.body = body


def serves_openai(config: ModelConfig) -> bool:
    """Whether a model has the contract."""
    return any(each.name == REQUEST for each in config.input) and any(
        each.name == RESPONSE for each in config.output
    )


def declares_endpoint(config: ModelConfig) -> bool:
    """Whether a model can be told what a request is for; if not, all are chat completions."""
    return any(each.name == ENDPOINT for each in config.input)


def further_names(config: ModelConfig) -> Sequence[str]:
    """The names of a model besides its own, such as those of its adapters.

    INVALID_ARG if the parameter `openai_names` is no JSON list of texts.
    """
    given = config.parameters.get(NAMES, "")
    if not given:
        return ()
    try:
        names = orjson.loads(given)
    except orjson.JSONDecodeError:
        names = None
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise InferenceError(
            Code.INVALID_ARG,
            f"parameter '{NAMES}' of model '{config.name}' is {given!r}, expected a JSON list of "
            "names",
        )
    return names


def request_tensors(body: bytes, endpoint: Endpoint, config: ModelConfig) -> tuple[Tensor, ...]:
    """The inputs that carry a request to a model of this config."""
    shape = (1, 1) if config.batching else (1,)
    request = Tensor(REQUEST, Datatype.BYTES, shape, (body,))
    if not declares_endpoint(config):
        return (request,)
    return (request, Tensor(ENDPOINT, Datatype.BYTES, shape, (endpoint.value.encode(),)))


def read_request(request: InferRequest) -> tuple[Endpoint, dict[str, Any]] | None:
    """What is asked for, and the body; None if the request carries none.

    INVALID_ARG if the body is no JSON object, or the endpoint is unknown.
    """
    given = request.input(REQUEST)
    if given is None:
        return None
    try:
        body = orjson.loads(_only(given))
    except orjson.JSONDecodeError as error:
        raise _invalid(f"input '{REQUEST}' is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise _invalid(f"input '{REQUEST}' is JSON, but an object is expected in it")
    return _endpoint(request.input(ENDPOINT)), body


def _endpoint(given: Tensor | None) -> Endpoint:
    if given is None:
        return Endpoint.CHAT
    name = _only(given).decode(errors="replace")
    try:
        return Endpoint(name)
    except ValueError:
        known = ", ".join(Endpoint)
        raise _invalid(f"input '{ENDPOINT}' is '{name}', expected one of {known}") from None


def _only(tensor: Tensor) -> bytes:
    elements = tensor.elements()
    if len(elements) != 1:
        raise _invalid(f"input '{tensor.name}' has {len(elements)} elements, expected 1")
    return bytes(elements[0])


def _invalid(message: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, message)
