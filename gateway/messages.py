"""Values between frontends and backends: requests and responses."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

from gateway.errors import Code, InferenceError
from gateway.policy.caller import Caller
from gateway.tensor import Datatype, Tensor, keyword_value, value

Parameter = bool | int | float | str
"""A parameter of the v2 protocol."""

SequenceKey = int | str | tuple[str, int | str]
"""The identity of a sequence on its model: its id, behind the tenant if there is one."""

NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})


def _no_parameters() -> Mapping[str, Any]:
    return NO_PARAMETERS


@value
class SharedRegion:
    """A part of a registered shared memory region; offset and size in bytes.

    `memory` is the located region: the part stays valid after the region is unregistered.
    """

    name: str
    byte_size: int
    offset: int = 0
    memory: object | None = field(default=None, compare=False, repr=False)


@value
class RequestedOutput:
    """A requested output.

    `classes` > 0 requests the classification extension, `region` the data in shared memory.
    """

    name: str
    classes: int = 0
    region: SharedRegion | None = None


MOST_OUTPUTS = 1024
"""Outputs that a request may list, repetitions included."""


def too_many_outputs(count: int) -> InferenceError:
    """The error of a request that lists more than MOST_OUTPUTS outputs."""
    return InferenceError(
        Code.INVALID_ARG,
        f"the request lists {count} outputs, expected at most {MOST_OUTPUTS}; list each output "
        "once, or none for all outputs",
    )


def asked_once(outputs: Sequence[RequestedOutput]) -> tuple[RequestedOutput, ...]:
    """The outputs without repetition, as Triton serves them.

    Of several with one name the first with `classes` or `region` counts, else the first.
    """
    found: dict[str, RequestedOutput] = {}
    for each in outputs:
        known = found.setdefault(each.name, each)
        if not (known.classes or known.region):
            found[each.name] = each
    return tuple(found.values())


@value
class SequenceTag:
    """The position of a request in its sequence; `correlation_id` 0 or "" means no sequence.

    Tenants choose their ids independently: `key` differs among sequences.
    """

    correlation_id: int | str
    start: bool = False
    end: bool = False
    tenant: str = ""

    @property
    def key(self) -> SequenceKey:
        """The identity of the sequence on its model."""
        return (self.tenant, self.correlation_id) if self.tenant else self.correlation_id


class Lineage(Protocol):
    """The trace of a request, as the parent of traces."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers by which another program continues the trace; empty if it cannot."""

    def child(self) -> Self:
        """The trace of a request that a model makes for this one."""


class Account(Protocol):
    """The receipt of a request, whose client asks for its times."""

    def accepted(self, request: "InferRequest", version: str, record: Any) -> None:
        """That version has accepted the request, whose times are in that record."""

    def refused(self, request: "InferRequest", error: InferenceError) -> None:
        """The request was refused before it was queued."""

    def executes(self, batch: Any) -> None:
        """An instance executes the request in that batch; None if it is queued again."""

    def member(self, request: "InferRequest") -> "Account | None":
        """The receipt of a request of an ensemble to one of its members."""


class Cancellation(Protocol):
    """The cancellation of one request, for the backend that executes it."""

    @property
    def cancelled(self) -> bool:
        """Whether the client has disconnected."""

    @property
    def stopping(self) -> bool:
        """Whether the model should end the request early, with an answer of its own."""

    def subscribe(self, callback: Callable[[], None], *, may_stop: bool = False) -> None:
        """Call a synchronous function once `cancelled` is set; immediately if it already is.

        With `may_stop` it is also called once `stopping` is set, and `cancelled` may follow.
        Without, a request that should end early ends with CANCELLED, and without a call.
        There is one subscriber: a later one replaces it. An instance that subscribes and delegates
        to another passes it `replace(request, cancellation=None)`.
        """


class Sink(Protocol):
    """Takes responses of one request from the code that makes them, so that no task wakes for them.

    The execution of a request with a sink yields its other responses. What it yielded was taken
    when it runs again; a response goes to the sink only if that has room. `model_at` is set
    while the request waits for a first replica, or for a model that is asleep: the loop's time at
    which that is expected.
    """

    model_at: float | None

    @property
    def has_room(self) -> bool:
        """Whether it takes a response: the client reads, and has not disconnected."""

    @property
    def full(self) -> bool:
        """Whether the unread responses have reached its limit."""

    def when_room(self, wake: asyncio.Future[None]) -> None:
        """Resolve `wake` once it is not full, or the client has disconnected."""

    def put(self, response: "InferResponse") -> bool:
        """Deliver a response at once; returns whether no more has room."""

    def put_texts(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> bool:
        """As `put` of the `response_of_text` of each, which the reader may write without it."""


class StreamRecorder(Protocol):
    """Accounts for a stream. Its methods are synchronous and must not raise."""

    def responded(self, response: "InferResponse") -> None:
        """A response was put into the stream."""

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """As `responded` of the `response_of_text` of each, which the reader has written."""

    def taken(self) -> None:
        """The reader took the first response."""

    def wasted(self, response: "InferResponse") -> None:
        """A response was produced after the stream had ended."""

    def ended(self, error: InferenceError | None) -> None:
        """The stream ended: complete, failed or cancelled. Called exactly once."""


class Checked(NamedTuple):
    """The result of a validation by `rules`: the batch size of the request."""

    rules: object
    batch_size: int


@value
class RoutedPrompt:
    """A prompt as the router of a fleet found it: its bytes, and the keys of its prefixes."""

    size_bytes: int
    keys: tuple[bytes, ...] = ()


WATCHED = 8
"""Requests in flight from which on limits of clients' own matter: many send one with each."""


@value
class Deadline:
    """Times of `time.perf_counter_ns` by which a request has its responses; 0 is none.

    The first response is due at `first_ns`, the whole answer at `whole_ns`. The server ends a
    request that has none at `held_first_ns`, or is incomplete at `held_whole_ns`; at the others
    its client or its RPC ends. `slo_first_ns` and `slo_token_ns` are wishes: the durations to the
    first response, and of each token behind it. It is `asked` of the server unless it is only that
    of a client, or of an RPC.
    """

    first_ns: int = 0
    whole_ns: int = 0
    held_first_ns: int = 0
    held_whole_ns: int = 0
    slo_first_ns: int = 0
    slo_token_ns: int = 0
    asked: bool = False


@keyword_value
class InferRequest:
    """One request.

    `version` "" requests the highest ready version. `parameters` are the client's own: strings,
    numbers and booleans; HTTP generate also passes JSON arrays and objects to LLM models.
    `timeout_us` and `priority` 0 mean the model's default. `received_ns` is the time of its first
    byte (`time.perf_counter_ns`), 0 if unknown. `trace` is the request's own after submission;
    before, that of its parent request. `checked` is the result of an earlier validation, which
    the model does not repeat. `cancellation` is set while it executes, unless the execution
    continues without clients. `sink` is set while it executes alone; an instance that changes the
    responses of another passes it `replace(request, sink=None)`. `caller` is None on a server
    without API keys, and in a program with the server in it. `prompt` is set by the router of a
    fleet, for models with tokens. `sticky` are the headers and members of OpenAI that a rollout may
    use as key, by `header:NAME` and `openai:NAME`; only a model with such a rollout gets them.
    Members of an ensemble neither count an `uncounted` request nor answer it from a cache.
    `version` is `chosen` if a router has set it for a client that named none, during a rollout.
    `deadline` is None if nothing in the request names one, `receipt` unless the times of the
    request are asked for. The limit of requests of its tenant has counted a `prepaid` one before.
    """

    model: str
    version: str = ""
    id: str = ""
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=_no_parameters)
    sequence: SequenceTag | None = None
    priority: int = 0
    timeout_us: int = 0
    received_ns: int = 0
    trace: Lineage | None = field(default=None, compare=False, repr=False)
    checked: Checked | None = field(default=None, compare=False, repr=False)
    cancellation: Cancellation | None = field(default=None, compare=False, repr=False)
    sink: Sink | None = field(default=None, compare=False, repr=False)
    caller: Caller | None = field(default=None, compare=False, repr=False)
    prompt: RoutedPrompt | None = None
    sticky: Mapping[str, str] | None = field(default=None, compare=False, repr=False)
    uncounted: bool = False
    chosen: bool = field(default=False, compare=False, repr=False)
    deadline: Deadline | None = field(default=None, compare=False, repr=False)
    receipt: Account | None = field(default=None, compare=False, repr=False)
    prepaid: bool = field(default=False, compare=False, repr=False)

    def input(self, name: str) -> Tensor | None:
        """The input of that name, or None."""
        for tensor in self.inputs:
            if tensor.name == name:
                return tensor
        return None


def request_prefix(request_id: str) -> str:
    """The prefix of most of Triton's errors of a request."""
    return f"[request id: {request_id or '<id_unknown>'}] "


@value
class Usage:
    """Tokens of one response: of the prompt, and those that this response adds.

    `cached_tokens` are those of the prompt that the engine found in its cache; None if unknown.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    cached_tokens: int | None = field(default=None, compare=False)


@value
class Phases:
    """The durations of the phases of an execution, in nanoseconds."""

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


@value
class EngineStamps:
    """Times at which an engine that batches in flight took up a request, of `time.monotonic_ns`.

    0 if the engine does not say. It was put back `preemptions` times, and queued for a `limit`.
    """

    queued_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    preemptions: int = 0
    limit: str = ""


RESPONSE_BYTES = 64 << 10
"""The size of a response without its tensors."""


@keyword_value
class InferResponse:
    """One response; `final` marks the last one of its request.

    A final response without outputs is only the flag (Triton's empty final response). `phases`
    are those of its execution, if the backend measures them, `engine` those of its engine, in the
    last response. A response with an `error` has no outputs, and more may follow: an error that
    ends its request is raised instead. `shared_bytes` is the size of its outputs in another
    process's memory; streams hold few such responses.
    """

    outputs: tuple[Tensor, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=_no_parameters)
    final: bool = False
    usage: Usage | None = None
    phases: Phases | None = None
    engine: EngineStamps | None = None
    shared_bytes: int = 0
    error: InferenceError | None = None

    @property
    def weight_bytes(self) -> int:
        """The approximate size in memory."""
        every = [tensor.data for tensor in self.outputs]
        sizes = [sum(map(len, each)) if isinstance(each, tuple) else len(each) for each in every]
        return RESPONSE_BYTES + max(sum(sizes), self.shared_bytes)

    def output(self, name: str) -> Tensor | None:
        """The output of that name, or None."""
        for tensor in self.outputs:
            if tensor.name == name:
                return tensor
        return None


def single(answers: Sequence[InferResponse]) -> InferResponse:
    """The only response; raises its error, or INTERNAL if there is not exactly one response."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    if len(answers) != 1:
        raise InferenceError(Code.INTERNAL, f"expected a single response, got {len(answers)}")
    return answers[0]


def response_of_text(
    name: str, text: bytes, tokens: int | None, shape: tuple[int, ...] = (1,)
) -> InferResponse:
    """A response with one output of one element of BYTES, and the number of its tokens if any."""
    return responses_of_texts(name, (text,), (tokens,), shape)[0]


def responses_of_texts(
    name: str,
    texts: Sequence[bytes],
    tokens: Sequence[int | None],
    shape: tuple[int, ...] = (1,),
) -> list[InferResponse]:
    """The `response_of_text` of each."""
    return [
        InferResponse(
            outputs=(Tensor(name, Datatype.BYTES, shape, (text,)),),
            parameters=NO_PARAMETERS,
            usage=None if count is None else _usage(count),
        )
        for text, count in zip(texts, tokens, strict=True)
    ]


@lru_cache(1024)
def _usage(tokens: int) -> Usage:
    return Usage(completion_tokens=tokens)
