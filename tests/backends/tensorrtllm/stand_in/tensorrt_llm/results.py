"""Results of the stand-in: one object that grows, as the library's does."""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = field(default_factory=list)
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: Any = None
    additional_generation_outputs: Any = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None


@dataclass(frozen=True)
class Piece:
    """Of an answer: its text, its token, and one that it might have been instead."""

    text: str
    token: int
    other: int


class RequestOutput:
    """Iterated over in the loop it was made in; every step yields this object, changed."""

    def __init__(self, engine: Any, prompt: str | None, tokens: list[int], streaming: bool) -> None:
        self.request_id = engine.next_id()
        self.prompt, self.prompt_token_ids = prompt, tokens
        self.outputs: list[CompletionOutput] = []
        self.finished = False
        self.context_logits = None
        self._streaming = streaming
        self._aborted = False
        self._steps: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        """After every response of the engine, whether streaming or not."""
        if self.finished:
            raise StopAsyncIteration
        await self._take()
        return self

    async def aresult(self) -> "RequestOutput":
        """Once all sequences have ended."""
        while not self.finished:
            await self._take()
        return self

    def __await__(self) -> Generator[Any, None, "RequestOutput"]:
        return self.aresult().__await__()

    def abort(self) -> None:
        self._aborted = True
        if "!unabortable" in (self.prompt or ""):
            raise RuntimeError("the executor has not been told")

    def aborted(self) -> bool:
        return self._aborted

    async def follow(self, words: list[Piece], params: Any, pace: float) -> None:
        """Make the words, one token each, unless aborted.

        Each sequence is a response of its own, beams are one; without a stream it comes whole.
        """
        self.outputs = [CompletionOutput(index) for index in range(params.n)]
        said = words[: params.max_tokens]
        reason = "length" if len(said) == params.max_tokens else "stop"
        for number, word in enumerate(said, 1):
            await asyncio.sleep(pace)
            if self._aborted:
                self._respond([], self.outputs, params, "cancelled")
                return
            last = number == len(said)
            if self._streaming or last:
                new = [word] if self._streaming else said
                self._respond_each(new, params, reason if last else None)

    def fail(self, error: Exception) -> None:
        self._steps.put_nowait(error)

    async def _take(self) -> None:
        assert asyncio.get_running_loop() is self._loop
        step = await self._steps.get()
        if isinstance(step, Exception):
            raise step
        step()

    def _respond_each(self, words: list[Piece], params: Any, reason: str | None) -> None:
        if params.use_beam_search:
            self._respond(words, self.outputs, params, reason)
            return
        for output in self.outputs:
            # Only the output that ends last gets the reason; the others keep none.
            final = reason if output is self.outputs[-1] else None
            self._respond(words, [output], params, final)

    def _respond(
        self,
        words: list[Piece],
        outputs: list[CompletionOutput],
        params: Any,
        reason: str | None,
    ) -> None:
        def change() -> None:
            for output in outputs:
                grow(output, words, params, reason)
            self.finished = reason is not None

        self._steps.put_nowait(change)


def grow(output: CompletionOutput, words: list[Piece], params: Any, reason: str | None) -> None:
    for word in words:
        output.text += word.text
        output.token_ids.append(word.token)
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) - 0.5
        if params.logprobs is not None:
            known = {word.other: Logprob(-9.0, 2), word.token: Logprob(-0.5, 1)}
            output.logprobs.append(known)
    output.finish_reason = reason
    if params.return_perf_metrics and reason:
        output.request_perf_metrics = perf_metrics()


def perf_metrics() -> Any:
    times = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
    return SimpleNamespace(
        timing_metrics=SimpleNamespace(
            **{name: timedelta(seconds=n) for n, name in enumerate(times, 1)}
        ),
        kv_cache_metrics=SimpleNamespace(
            num_total_allocated_blocks=3,
            num_new_allocated_blocks=2,
            num_reused_blocks=1,
            num_missed_blocks=2,
            kv_cache_hit_rate=0.25,
        ),
        speculative_decoding=SimpleNamespace(
            acceptance_rate=0.0, total_accepted_draft_tokens=0, total_draft_tokens=0
        ),
    )
