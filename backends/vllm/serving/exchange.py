"""The engine as vLLM's handlers see it during one request of a client."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from vllm.exceptions import GenerationError, VLLMError, VLLMValidationError

from backends.vllm.engine_request import EngineRequest, cached_tokens, count_tokens, merged, text_of
from backends.vllm.metrics import EngineMetrics
from backends.vllm.serving.chunk_template import ChunkTemplate
from backends.vllm.serving.endpoints import check_count, check_parameters
from gateway.errors import Code, InferenceError
from gateway.messages import EngineStamps, Sink, Usage
from gateway.openai_contract import RESPONSE

DISCONNECTS = (asyncio.CancelledError, GeneratorExit)


class Exchange:
    """Passes requests of the handlers to the engine, and counts their tokens.

    Used in an `async with`: its exit aborts unfinished requests, as `EngineRequest` does, and
    calls `wasted` with the tokens that no response carried. Attributes other than `generate` and
    `encode` are the engine's. `failure` is the engine's error, which handlers of streams swallow.
    `latest_chunk` is the one that the handler made last.
    """

    def __init__(
        self,
        engine: Any,
        new_id: Callable[[], str],
        wasted: Callable[[int], None],
        metrics: EngineMetrics | None = None,
        tenant: str = "",
    ) -> None:
        self._metrics = metrics
        self._tenant = tenant
        self.failure: VLLMError | None = None
        self.begun = False
        self.latest_chunk = b""
        self._template: ChunkTemplate | None = None
        self._sink: Sink | None = None
        self._engine = engine
        self._new_id = new_id
        self._wasted = wasted
        self._generations: list[Generation] = []
        self._prompt_tokens = 0
        self._cached_tokens: int | None = None
        self._completion_tokens = 0
        self._finish_reason = ""
        self.trace_headers: Mapping[str, str] | None = None
        self.is_timed = False
        """Those of each of its requests to the engine, as the headers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        unfinished = [each.running for each in self._generations if not each.running.finished]
        await asyncio.gather(*(running.abort_unfinished() for running in unfinished))
        if self._completion_tokens and kind is not None and issubclass(kind, DISCONNECTS):
            self._wasted(self._completion_tokens)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> "Generation":
        """As `EngineClient.generate`; raises immediately if the request exceeds a limit."""
        check_parameters(sampling_params)
        return self._generation(prompt, sampling_params, options)

    def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, **options: Any
    ) -> "Generation":
        """As `EngineClient.encode`; raises immediately if the request exceeds a limit."""
        return self._generation(prompt, pooling_params, options)

    async def begin(self) -> None:
        """Submit the prompts so far, so that the engine's refusals are raised here.

        A stream of one prompt also waits for its first output: some refusals come late.
        """
        for generation in self._generations:
            await generation.submit()
        if len(self._generations) == 1:
            await self._generations[0].fetch()

    def divert_to(self, sink: Sink | None, template: ChunkTemplate | None) -> None:
        """Let the chunks of plain deltas go to the sink, past the handler; None: they do not."""
        self._sink, self._template = sink, template

    def divert(self, running: EngineRequest, text: str) -> bool:
        """Divert a generation whose latest text is in the latest chunk; False if it cannot be."""
        template, sink = self._template, self._sink
        if template is None or sink is None or len(self._generations) != 1:
            return False
        if not template.learn(self.latest_chunk, text):
            return False
        return running.divert(partial(self._put_delta, template, sink), sink)

    def _put_delta(self, template: ChunkTemplate, sink: Sink, text: str, tokens: int) -> None:
        self._completion_tokens += tokens
        if text or not template.skips_empty:
            tokens, self._completion_tokens = self._completion_tokens, 0
            sink.put_texts(RESPONSE, (template.chunk(text),), (tokens,))

    @property
    def finished(self) -> bool:
        """Whether all generations so far have their last output."""
        return self.begun and all(each.running.finished for each in self._generations)

    def usage(self, *, final: bool) -> Usage:
        """The tokens since the last call."""
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            finish_reason=self._finish_reason if final else "",
            cached_tokens=self._cached_tokens,
        )
        self._cached_tokens = None
        self._prompt_tokens = self._completion_tokens = 0
        return usage

    @property
    def stamps(self) -> EngineStamps | None:
        """The engine's times of all prompts together, once it has finished them."""
        return merged([each.running.stamps for each in self._generations])

    def count(self, output: Any, *, first: bool) -> None:
        """Count the tokens of an output; `first` for the first one of a prompt of the client."""
        self.begun = True
        if first:
            self._prompt_tokens += len(output.prompt_token_ids or ())
            found = cached_tokens(output)
            if found is not None:
                self._cached_tokens = (self._cached_tokens or 0) + found
        self._completion_tokens += count_tokens(output)
        if isinstance(output.outputs, list):
            reasons = [each.finish_reason for each in output.outputs if each.index == 0]
            self._finish_reason = next(filter(None, reasons), self._finish_reason)

    def _generation(self, prompt: Any, parameters: Any, options: dict[str, Any]) -> "Generation":
        if self.begun:
            self._generations = [each for each in self._generations if not each.spent]
        check_count(len(self._generations) + 1)
        new = self._new_id()
        running = EngineRequest(self._engine, new, self._wasted, self._metrics, self._tenant)
        running.trace_headers = self.trace_headers
        running.is_timed = self.is_timed
        # A generation after the first output continues a prompt, as in a beam search.
        generation = Generation(self, running, (prompt, parameters, options), own=not self.begun)
        self._generations.append(generation)
        return generation


class Generation:
    """The outputs of one prompt, as the handlers iterate them.

    Unlike vLLM's own generator it ends with the exchange, not with its iterator.
    """

    def __init__(
        self,
        exchange: Exchange,
        running: EngineRequest,
        arguments: tuple[Any, Any, dict[str, Any]],
        *,
        own: bool,
    ) -> None:
        self.running = running
        self._exchange = exchange
        self._arguments = arguments
        self._first = own
        self._fetched: Any = None
        self._submitted = False
        self._may_divert = own
        self._latest_text: str | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        output, self._fetched = self._fetched, None
        return await self._next() if output is None else output

    async def aclose(self) -> None:
        """No effect: the exchange ends the generation."""

    @property
    def spent(self) -> bool:
        """Whether all outputs have been read."""
        return self.running.finished and self._fetched is None

    async def submit(self) -> None:
        """Submit the prompt to the engine, once; raises errors of vLLM."""
        if not self._submitted:
            self._submitted = True
            prompt, parameters, options = self._arguments
            await self._watched(self.running.submit(prompt, parameters, **options))

    async def fetch(self) -> None:
        """Wait for the first output, and keep it for `__anext__`."""
        self._fetched = await self._next()

    async def _next(self) -> Any:
        await self.submit()
        if self.running.finished:
            raise StopAsyncIteration
        if self._may_divert and self._latest_text is not None:
            self._may_divert = not self._exchange.divert(self.running, self._latest_text)
        output = await self._watched(self.running.next())
        self._exchange.count(output, first=self._first)
        self._first = False
        if self._may_divert:
            self._latest_text = text_of(output)
        elif diverted := self.running.diverted():
            # The handler sums up the tokens of its outputs.
            output.outputs[0].token_ids = [*diverted, *output.outputs[0].token_ids]
        return output

    async def _watched(self, work: Any) -> Any:
        try:
            return await work
        except InferenceError as error:
            self._exchange.failure = _as_vllms(error)
            raise self._exchange.failure from error
        except VLLMError as error:
            self._exchange.failure = error
            raise


def _as_vllms(error: InferenceError) -> VLLMError:
    """The engine's refusal as an error that the handlers handle."""
    if error.code is Code.INVALID_ARG:
        return VLLMValidationError(error.message)
    return GenerationError(error.message)
