"""Costs of requests: what they ask for, and what requests of a model have cost so far."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import orjson

from gateway.generation import MESSAGES, SAMPLING_PARAMETERS, TEXT_INPUT, generates_text
from gateway.messages import InferRequest, Usage
from gateway.models.model import Model
from gateway.observability.request_record import Record
from gateway.openai_contract import ENDPOINT, REQUEST, Endpoint, RequestBody
from gateway.schedulers.service import NS_PER_MS
from gateway.schedulers.token_ratio import TokenRatio, size_bytes
from gateway.tensor import LENGTH_BYTES, Datatype, Tensor

MOST_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Members of OpenAI's API, and sampling parameters, with the tokens of one answer."""
COUNTS = ("n", "best_of")
LISTS = ("prompt", "input", "documents", "text_1", "text_2", "data_1", "data_2", "items")
"""Members with a list of texts, each of which is one prompt."""
WITHOUT_ANSWER = frozenset(
    {Endpoint.EMBEDDINGS, Endpoint.SCORE, Endpoint.RERANK, Endpoint.TOKENIZE, Endpoint.DETOKENIZE}
)
READ_BYTES = 1 << 14
"""A longer JSON text is not parsed here, since that would block other requests."""
LONGEST_NUMBER = 32
"""Characters of a text that is read as a number."""
FIRST_ANSWER = 256
"""Tokens of an answer without a limit, before a tenant has had some of a model."""
ANSWERS = 32
"""The latest answers of a tenant whose 90th percentile is expected of the next one."""
LATEST = 0.2
"""The weight of the latest execution in the mean compute time."""
CACHED = 0.1
"""The cost of a prompt's token that the engine had in its cache, in tokens."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The size of a request: its prompts, their bytes, its answers, and their tokens.

    `max_tokens` is the limit of each answer; None if the request has none.
    """

    prompts: int = 1
    prompt_bytes: int = 0
    answers: int = 1
    max_tokens: int | None = None


WITHOUT_TOKENS = Asked(max_tokens=0)
"""The size of a request for a model without tokens."""


def read_asked(request: InferRequest) -> Asked:
    """The size of a request for text; the elements of a tensor are not split for it."""
    body = request.input(REQUEST)
    if body is not None:
        return _of_openai(body, request.input(ENDPOINT))
    texts = [
        found
        for name in (TEXT_INPUT, MESSAGES)
        if (found := request.input(name)) is not None and found.datatype is Datatype.BYTES
    ]
    sampling = request.input(SAMPLING_PARAMETERS)
    members = request.parameters if sampling is None else _parsed(sampling)
    prompts = max(1, sum(each.count for each in texts))
    most = _most(members)
    if most is None:
        most = _number(request.input(MOST_TOKENS[1]))
    return Asked(prompts, sum(map(size_bytes, texts)), prompts * _answers(members), most)


def _of_openai(body: Tensor, endpoint: Tensor | None) -> Asked:
    members = body.data.peek() if isinstance(body.data, RequestBody) else None
    if members is None:
        members = _parsed(body)
    size = size_bytes(body)
    name = "" if endpoint is None else _only(endpoint).decode("utf-8", "replace")
    prompts = 1 if name == Endpoint.RESPONSES else _prompts(members)
    if name in WITHOUT_ANSWER:
        return Asked(prompts, size, prompts, 0)
    return Asked(prompts, size, prompts * _answers(members), _most(members))


def _parsed(tensor: Tensor) -> Mapping[str, Any]:
    """The members of a JSON text; none of another or a long one: the model refuses what is none."""
    try:
        found = orjson.loads(_only(tensor))
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _only(tensor: Tensor) -> bytes:
    """The only text of a tensor; empty for another tensor, or a long text."""
    is_short = tensor.count == 1 and size_bytes(tensor) <= READ_BYTES + LENGTH_BYTES
    elements = tensor.elements() if is_short and tensor.datatype is Datatype.BYTES else ()
    return elements[0] if len(elements) == 1 else b""


def _prompts(members: Mapping[str, Any]) -> int:
    """The number of prompts; a list of numbers is one prompt of token ids."""
    lists = [found for name in LISTS if isinstance(found := members.get(name), list)]
    return max([1, *(len(each) for each in lists if each and not isinstance(each[0], int))])


def _answers(members: Mapping[str, Any]) -> int:
    return max(1, *(_whole(members.get(name)) or 1 for name in COUNTS))


def _most(members: Mapping[str, Any]) -> int | None:
    """The largest limit of an answer, since models differ in the member that counts."""
    found = [_whole(members.get(name)) for name in MOST_TOKENS]
    return max([each for each in found if each is not None], default=None)


def _whole(value: Any) -> int | None:
    """A number that is not negative, also as a text, as engines read it; the model refuses others.

    That of 100.0 and "100" is 100.
    """
    if isinstance(value, float) or (isinstance(value, str) and len(value) <= LONGEST_NUMBER):
        try:
            value = int(float(value))
        except (ValueError, OverflowError):
            return None
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_whole else None


def _number(tensor: Tensor | None) -> int | None:
    """The only number of a tensor of integers, as models of TensorRT-LLM have it."""
    if tensor is None or tensor.count != 1 or not tensor.datatype.endswith(("INT32", "INT64")):
        return None
    return _whole(int.from_bytes(tensor.raw(), "little", signed=True))


class Assuming(Protocol):
    """An account with requests that begin without a look; see `TenantAccount`."""

    def look(self) -> None:
        """Have its next requests looked at."""


class ModelCosts:
    """The costs of the requests of one model so far, from which those of the next are estimated.

    `compute_ms` is the mean of a request. Its latest answer `reports_tokens`, or none is there yet.
    Accounts assume that neither the mean nor a request is above `most_ns`.
    """

    def __init__(self, model: Model) -> None:
        self.has_tokens = generates_text(model.config)
        self._ratio = TokenRatio()
        self._answers: dict[str, deque[int]] = {}
        self.compute_ms = 0.0
        self.most_ns = inf
        self._assumed: WeakKeyDictionary[Assuming, float] = WeakKeyDictionary()
        self.reports_tokens = self.has_tokens

    def asked(self, request: InferRequest) -> Asked:
        """The size of a request; that of a model without tokens is one request."""
        return read_asked(request) if self.has_tokens else WITHOUT_TOKENS

    def prompt_tokens(self, asked: Asked) -> int:
        """The expected tokens of the prompts; 0 for a model without tokens."""
        return self._ratio.tokens(asked.prompt_bytes)

    def prefill(self, asked: Asked) -> float:
        """The tokens of an execution that its caller ends before it reports any."""
        return self.prompt_tokens(asked) if self.reports_tokens else 0.0

    def tokens(self, asked: Asked, tenant: str, most: int | None) -> float:
        """The most tokens that a request may use; each prompt with an answer at most `most`."""
        if not self.has_tokens:
            return 0
        prompt = self.prompt_tokens(asked)
        answer = self._usual(tenant) if asked.max_tokens is None else asked.max_tokens
        if most is not None:
            prompt = min(prompt, most * asked.prompts)
            answer = min(answer, max(0, most - prompt // asked.prompts))
        return prompt + asked.answers * answer

    def _usual(self, tenant: str) -> int:
        """The tokens of an answer without a limit: the tenant's 90th percentile."""
        found = self._answers.get(tenant)
        return sorted(found)[len(found) * 9 // 10] if found else FIRST_ANSWER

    def learn(self, asked: Asked, tenant: str, prompt: int, answers: int) -> None:
        """Take the tokens of a request that has its answer into account."""
        self.has_tokens = self.reports_tokens = True
        self._ratio.learn(asked.prompt_bytes, prompt)
        if tenant not in self._answers:
            self._answers[tenant] = deque(maxlen=ANSWERS)
        self._answers[tenant].append(answers // asked.answers)

    def learn_compute(self, compute_ms: float) -> None:
        """Take the compute time of a request that has an answer without tokens into account."""
        self.reports_tokens = False
        self.compute_ms += LATEST * (compute_ms - self.compute_ms)
        if self.compute_ms * NS_PER_MS > self.most_ns:
            self.exceeded(self.compute_ms * NS_PER_MS)

    def assume(self, account: Assuming, most_ns: float) -> None:
        """Have an account look at its next requests once one, or the mean, takes longer."""
        self._assumed[account] = most_ns
        self.most_ns = min(self.most_ns, most_ns)

    def exceeded(self, taken_ns: float) -> None:
        """A request, or the mean, takes longer than `most_ns`."""
        for account in [each for each, most in self._assumed.items() if most < taken_ns]:
            del self._assumed[account]
            account.look()
        self.most_ns = min(self._assumed.values(), default=inf)


def used_tokens(found: Usage | Record) -> float:
    """The tokens that a response has cost, or a request."""
    cached = found.cached_tokens
    if not cached:
        return found.prompt_tokens + found.completion_tokens
    return found.prompt_tokens - cached + CACHED * cached + found.completion_tokens
