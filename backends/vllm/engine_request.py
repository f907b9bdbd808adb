"""One request in the engine: its outputs, and its abort."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from types import TracebackType
from typing import Any, Self

import orjson
from vllm.exceptions import VLLMError
from vllm.outputs import EmbeddingRequestOutput, PoolingRequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from backends.vllm.diverted_deltas import DivertedDeltas, TakeDelta, divert
from backends.vllm.grammar_time import SECS as GRAMMAR_SECS
from backends.vllm.grammar_time import check_constraint
from backends.vllm.metrics import EngineMetrics
from backends.vllm.queue_limits import QueueLimits
from gateway.errors import Code, InferenceError
from gateway.generation import Delta
from gateway.messages import EngineStamps, InferRequest, Sink

ABORT_TIMEOUT_SECS = 1.0
"""An abort is only sent. To an engine that has just died it may never be."""
NS_PER_SECOND = 1e9
SALT = "cache_salt"
DECODER = "decoder_prompt"
"""Keys of an engine's input: a part of the cache's keys, and the input of a decoder."""
CANNOT_FOLLOW = (
    "the engine cannot follow the 'structured_outputs' of the request, or not prepare that within "
    f"{GRAMMAR_SECS:g} s"
)


class EngineRequest:
    """One request in the engine, from `submit` to its last output; used in an `async with`.

    Exiting the block before the last output aborts the request immediately, and calls `wasted`
    with the number of delivered unread tokens: with streaming those since the last output, else
    all of them. Tokens of the step during which the abort arrives are not counted. At its end
    `metrics` get the numbers of its outputs. Only requests of the same `tenant` share beginnings of
    prompts in the engine's cache: the time of an answer shows whether a beginning was known.
    """

    def __init__(
        self,
        engine: Any,
        request_id: str,
        wasted: Callable[[int], None],
        metrics: EngineMetrics | None = None,
        tenant: str = "",
    ) -> None:
        self.finished = False
        self._tenant = tenant
        self._metrics = metrics
        self._counts = None if metrics is None else metrics.outputs
        self._read_count = 0
        self._engine = engine
        self._id = request_id
        self._wasted = wasted
        self._outputs: Any = None
        self._constrained = False
        self._diverted: DivertedDeltas | None = None
        self._statistics: Sequence[Any] = ()
        self.trace_headers: Mapping[str, str] | None = None
        """Those of the trace that vLLM's own span continues."""
        self.is_timed = False
        """Whether something reads its stamps."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.abort_unfinished()

    async def abort_unfinished(self) -> None:
        """Abort the request unless it has finished; the exit of the block does this too."""
        self._end_outputs()
        if self._outputs is not None and not self.finished and not self._engine.errored:
            await self._abort()

    async def submit(self, prompt: Any, parameters: Any, **options: Any) -> None:
        """Submit the request to the engine, which checks it and raises its errors.

        The options are those of `AsyncLLM.add_request`.
        """
        # Before Python 3.12 `wait_for`, in which vLLM renders, returns what is ready instead.
        raise_if_cancelled()
        constraint = getattr(parameters, "structured_outputs", None)
        if self._tenant:
            prompt = salted(prompt, self._tenant)
        self._constrained = constraint is not None
        check_constraint(constraint)
        if self.trace_headers is not None:
            options["trace_headers"] = self.trace_headers
        try:
            self._outputs = await self._engine.add_request(self._id, prompt, parameters, **options)
        except BaseException:
            # It may be registered already; then only an abort by this id removes it.
            await self._abort_within_limit(self._id, internal=False)
            raise
        if self.is_timed and getattr(parameters, "n", 1) > 1:
            self._statistics = _statistics_of(self._engine, self._outputs)

    async def next(self) -> Any:
        """Wait for the output since the last call.

        Raises InferenceError if the request failed in the engine, and EngineDeadError if the engine
        or its client has failed.
        """
        try:
            output = self._outputs.get_nowait() or await self._next_output()
        except Exception as error:
            # An error within a step ends vLLM's client, which passes it to each of its requests.
            if self._engine.errored and not isinstance(error, VLLMError):
                raise EngineDeadError from error
            raise
        self._read_count += 1
        if output.finished:
            self.finished = True
            self._end_outputs()
            self._statistics = self._statistics or (getattr(output, "metrics", None),)
            if failed(output):
                raise self._failure()
        return output

    @property
    def stamps(self) -> EngineStamps | None:
        """The engine's times of a finished request that `is_timed`, if the engine measures them.

        Of several sequences they are the earliest starts, and the latest token.
        """
        found = [each for each in self._statistics if each is not None]
        if not (self.is_timed and self.finished and found):
            return None
        limits = None if self._metrics is None else self._metrics.limits
        return stamps_of(found, limits)

    async def _next_output(self) -> Any:
        if self._diverted is None:
            return await self._outputs.get()
        self._diverted.waiting = True
        try:
            return await self._outputs.get()
        finally:
            self._diverted.waiting = False

    def divert(self, take: TakeDelta, sink: Sink) -> bool:
        """Have later plain deltas passed to `take` instead of returned by `next`.

        False if the engine's outputs are of another kind: `next` returns all of them.
        """
        self._diverted = divert(self._engine, self._outputs, take, sink)
        return self._diverted is not None

    def _end_outputs(self) -> None:
        """Divert no further deltas, and count the outputs; idempotent."""
        if self._diverted is not None:
            self._diverted.end()
        counts, self._counts = self._counts, None
        if counts is not None:
            diverted = 0 if self._diverted is None else self._diverted.count
            counts.add(diverted=diverted, read=self._read_count)

    def diverted(self) -> list[int]:
        """The tokens of the deltas that were diverted since the last call."""
        return [] if self._diverted is None else self._diverted.taken()

    def _failure(self) -> InferenceError:
        # vLLM's checks accept some grammars that its engine cannot compile or follow.
        if self._constrained:
            return InferenceError(Code.INVALID_ARG, CANNOT_FOLLOW)
        return InferenceError(Code.INTERNAL, "the engine failed while it worked on the request")

    async def _abort(self) -> None:
        await self._abort_within_limit(self._outputs.request_id, internal=True)
        with suppress(VLLMError):
            self._wasted(count_tokens(self._outputs.get_nowait()))

    async def _abort_within_limit(self, request_id: str, *, internal: bool) -> None:
        """Abort in a separate task: a timeout does not work in a cancelled task."""
        abort = asyncio.ensure_future(self._engine.abort(request_id, internal=internal))
        try:
            await asyncio.wait((abort,), timeout=ABORT_TIMEOUT_SECS)
        finally:
            if not abort.done():
                abort.cancel()
                await asyncio.wait((abort,))
        if not abort.cancelled() and not isinstance(abort.exception(), VLLMError):
            abort.result()


def _statistics_of(engine: Any, outputs: Any) -> Sequence[Any]:
    """The statistics of each sequence of a request that has several."""
    states = getattr(getattr(engine, "output_processor", None), "request_states", {})
    return [each.stats for each in states.values() if each.queue is outputs]


def stamps_of(statistics: Sequence[Any], limits: QueueLimits | None = None) -> EngineStamps:
    """The stamps in vLLM's statistics of the sequences of one request."""
    scheduled_ns = _earliest([_ns(each.scheduled_ts) for each in statistics])
    return EngineStamps(
        queued_ns=_earliest([_ns(each.queued_ts) for each in statistics]),
        scheduled_ns=scheduled_ns,
        first_token_ns=_earliest([_ns(each.first_token_ts) for each in statistics]),
        last_token_ns=_ns(max(each.last_token_ts for each in statistics)),
        preemptions=sum(each.num_preemptions for each in statistics),
        limit="" if limits is None else limits.at(scheduled_ns / NS_PER_SECOND),
    )


def merged(every: Sequence[EngineStamps | None]) -> EngineStamps | None:
    """The stamps of several prompts as those of one; None if those of one are unknown."""
    known = [each for each in every if each is not None]
    if not known or len(known) < len(every):
        return None
    return EngineStamps(
        queued_ns=_earliest([each.queued_ns for each in known]),
        scheduled_ns=_earliest([each.scheduled_ns for each in known]),
        first_token_ns=_earliest([each.first_token_ns for each in known]),
        last_token_ns=max(each.last_token_ns for each in known),
        preemptions=sum(each.preemptions for each in known),
        limit=min(known, key=lambda each: each.scheduled_ns).limit,
    )


def _earliest(moments: Sequence[int]) -> int:
    return min(filter(None, moments), default=0)


def _ns(secs: float) -> int:
    return round(secs * NS_PER_SECOND)


def is_timed(request: InferRequest) -> bool:
    """Whether something reads the engine's times of a request."""
    return request.receipt is not None or request.trace is not None


def headers_of(request: InferRequest, engine: Any) -> Mapping[str, str] | None:
    """The headers of the trace of a request; None if it has none, or the engine does not trace."""
    if request.trace is None or not request.trace.headers:
        return None
    endpoint = engine.observability_config.otlp_traces_endpoint
    return None if endpoint is None else request.trace.headers


def salted(prompt: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """An engine's input with the `cache_salt` of a tenant, made of its own one if it has one."""
    if DECODER in prompt:
        return {**prompt, DECODER: salted(prompt[DECODER], tenant)}
    own = prompt.get(SALT) or ""
    text = f"{tenant}\0{own}".encode("utf-8", "surrogatepass")
    return {**prompt, SALT: sha256(text).hexdigest()}


def raise_if_cancelled() -> None:
    """Raise the cancellation of the current task that a function has caught and not raised."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def read_output(output: Any, *, logprobs: bool) -> list[Delta]:
    """One delta for each sequence of `output`, with log probabilities if `logprobs`."""
    if isinstance(output, PoolingRequestOutput):
        return [Delta(_embedding(output), 0)]
    return [
        Delta(
            completion.text,
            len(completion.token_ids),
            completion.index,
            completion.finish_reason,
            completion.cumulative_logprob,
            _logprobs(completion.logprobs) if logprobs else "null",
        )
        for completion in output.outputs
    ]


def text_of(output: Any) -> str | None:
    """The text of an output of one sequence; None for other outputs."""
    if isinstance(output, PoolingRequestOutput) or len(output.outputs) != 1:
        return None
    text: str = output.outputs[0].text
    return text


def failed(output: Any) -> bool:
    """Whether the request failed in the engine."""
    if isinstance(output, PoolingRequestOutput):
        return output.error is not None
    return any(completion.finish_reason == "error" for completion in output.outputs)


def count_tokens(output: Any) -> int:
    """The number of generated tokens in an output; 0 for None."""
    if output is None or isinstance(output, PoolingRequestOutput):
        return 0
    return sum(len(completion.token_ids) for completion in output.outputs)


def cached_tokens(output: Any) -> int | None:
    """The tokens of the prompt that were in the engine's cache; None if it does not count them."""
    found: int | None = getattr(output, "num_cached_tokens", None)
    return found


def _logprobs(positions: Any) -> str:
    if positions is None:
        return "null"
    written = [
        {
            str(token): {
                "logprob": chance.logprob,
                "rank": chance.rank,
                "decoded_token": chance.decoded_token,
            }
            for token, chance in position.items()
        }
        for position in positions
    ]
    return orjson.dumps(written).decode()


def _embedding(output: PoolingRequestOutput) -> str:
    vector = EmbeddingRequestOutput.from_base(output).outputs.embedding
    return orjson.dumps(vector).decode()
