"""Requests of OpenAI's API as tensors, for any backend and every frontend.

A model has the contract if it declares the input `openai_request` and the output
`openai_response`, both BYTES [1]. The input is the body of a request as JSON; the optional input
`openai_endpoint` is its endpoint. Each response has one JSON text in `openai_response`: the whole
answer, or with `"stream": true` a chunk, byte for byte the data of an event of OpenAI's stream.
The final flag replaces `[DONE]`. The parameter `openai_event` of a response is the name of the
event, if the endpoint names events (`responses`).
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

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
"""The config parameter with a JSON list of further names for the field `model` of requests."""


class Endpoint(StrEnum):
    """The endpoint of a request: its path after `/v1/`."""

    CHAT = "chat/completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    SCORE = "score"
    RERANK = "rerank"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


class OpenAiRefusal(InferenceError):
    """An error of the model in OpenAI's form: HTTP status, and JSON of the error.

    Other frontends treat it as any other error.
    """

    def __init__(self, code: Code, message: str, *, status: int, body: bytes) -> None:
        super().__init__(code, message)
        self.status = status
        self.body = body


class RequestBody(tuple[bytes]):
    """The data of the input `openai_request`: one JSON text, with its members until `take`.

    Copies of a tensor share it; bytes that leave the process have no members.
    """

    members: dict[str, Any] | None

    def __new__(cls, body: bytes, members: dict[str, Any] | None = None) -> Self:
        made = super().__new__(cls, (body,))
        made.members = members
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)

    def peek(self) -> Mapping[str, Any] | None:
        """The members, for a reader that leaves them; None if they are unknown or taken."""
        found: Mapping[str, Any] | None = vars(self).get("members")
        return found

    def take(self) -> dict[str, Any] | None:
        """The members, for one reader, which may change them; None if they are unknown or taken."""
        found: dict[str, Any] | None = vars(self).pop("members", None)
        return found


def serves_openai(config: ModelConfig) -> bool:
    """Whether a model has the contract."""
    return any(each.name == REQUEST for each in config.input) and any(
        each.name == RESPONSE for each in config.output
    )


def declares_endpoint(config: ModelConfig) -> bool:
    """Whether a model has the input for the endpoint; else all requests are chat completions."""
    return any(each.name == ENDPOINT for each in config.input)


def further_names(config: ModelConfig) -> Sequence[str]:
    """Further names of a model, such as those of its adapters.

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


def request_tensors(
    body: RequestBody, endpoint: Endpoint, config: ModelConfig
) -> tuple[Tensor, ...]:
    """The input tensors of a request to a model of this config."""
    shape = (1, 1) if config.max_batch_size > 0 else (1,)
    request = Tensor(REQUEST, Datatype.BYTES, shape, body)
    if not declares_endpoint(config):
        return (request,)
    return (request, Tensor(ENDPOINT, Datatype.BYTES, shape, (endpoint.value.encode(),)))


def read_request(request: InferRequest) -> tuple[Endpoint, dict[str, Any]] | None:
    """The endpoint and the members of a request; None if the request has no such input.

    The text is parsed only if its members are not known. INVALID_ARG if it is no JSON object, or
    the endpoint is unknown.
    """

    given = request.input(REQUEST)
    if given is None:
        return None
    known = given.data.take() if isinstance(given.data, RequestBody) else None
    members = _parse(given) if known is None else known
    return _endpoint(request.input(ENDPOINT)), members


def _parse(given: Tensor) -> dict[str, Any]:
    try:
        members = orjson.loads(_only(given))
    except orjson.JSONDecodeError as error:
        raise _invalid(f"input '{REQUEST}' is not valid JSON: {error}") from None
    if not isinstance(members, dict):
        raise _invalid(f"input '{REQUEST}' is JSON, but an object is expected in it")
    return members


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
