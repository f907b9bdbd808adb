"""Execution of one request, from its inputs to its last response."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from sluice_llm.chat import readable
from sluice_llm.deltas import SequenceDelta
from sluice_llm.metrics import TokenLengths
from sluice_llm.request import Inputs, LlmRequest, Mistake, clean
from sluice_llm.responses import ENDPOINT, REQUEST, OpenAiCall, TensorResponses, Writer, read_call
from sluice_llm.running import (
    CANCELLED,
    FINAL,
    PREFIX,
    AbortWatch,
    ModelContract,
    RunningRequest,
    answering,
    end,
)

from .deltas import DeltaReader
from .engine import LlmLibrary
from .model_file import AdapterRequests
from .request import end_beside_words, guided, read_request, revises

LONG_LETTERS = 4096
"""Prompts from this length on are tokenised in a thread."""
DEFAULT_TOKENS = 32
"""The library's default of new tokens."""


class RequestService:
    """Answers requests with an engine, any number concurrently, in one event loop."""

    def __init__(
        self,
        llm: Any,
        library: LlmLibrary,
        contract: ModelContract,
        adapters: AdapterRequests,
        live: AbortWatch,
        metrics: TokenLengths,
    ) -> None:
        self._llm, self._library, self._contract = llm, library, contract
        self._adapters, self._abort_watch, self._metrics = adapters, live, metrics

    async def answer(self, request: Any) -> None:
        """Send all responses to a request, or its error."""
        sender = request.get_response_sender()
        with answering(sender):
            async with aclosing(self._responses(request, sender)) as responses:
                async for response, final in responses:
                    sender.send(response, FINAL if final else 0)
                    # `send` does not block in the loop of all requests: wait for slow readers here.
                    await sender.room()

    async def _responses(self, request: Any, sender: Any) -> AsyncGenerator[tuple[Any, bool], None]:
        inputs = Inputs(request)
        if inputs.flag("stop"):
            self._stop(request.request_id())
        llm_request, writer = self._read(inputs)
        prompt, tokens = await self._prompt(llm_request)
        if isinstance(writer, OpenAiCall):
            llm_request = writer.within(self._contract.max_length, tokens)
        else:
            writer.prefix = self._echoed(llm_request, tokens)
        result = self._submit(prompt, llm_request)
        running = RunningRequest(request.request_id(), sender.is_cancelled, result)
        with self._abort_watch.holding(running):
            async with aclosing(self._steps(running, llm_request)) as steps:
                async for deltas, prompt_tokens, final in steps:
                    made = writer.responses(deltas, prompt_tokens, final=final)
                    for number, response in enumerate(made, 1):
                        yield response, final and number == len(made)

    def _read(self, inputs: Inputs) -> tuple[LlmRequest, Writer]:
        writer: Writer
        if REQUEST in inputs:
            names = self._adapters.names
            contract = self._contract
            call = read_call(inputs, contract.model, names, self._decoded, contract.parsers)
            llm_request, writer = call.llm_request, call
        else:
            inputs.text(ENDPOINT)  # has no effect without an OpenAI request
            llm_request = read_request(inputs)
            writer = TensorResponses(
                llm_request.outputs,
                self._decoded,
                with_logprobs=llm_request.sampling.get("logprobs") is not None,
                batched=self._contract.batched,
            )
        if llm_request.stream:
            self._check_stream(llm_request)
        return llm_request, writer

    def _check_stream(self, llm_request: LlmRequest) -> None:
        if not self._contract.decoupled:
            raise Mistake("Streaming is only supported in decoupled mode.", "UNSUPPORTED")
        if revises(llm_request.sampling):
            raise Mistake(
                "beams, and a 'best_of' above the number of sequences, cannot be streamed: which "
                "of them are the answer is known only at the end",
                "UNSUPPORTED",
            )

    def _stop(self, request_id: str) -> None:
        """Abort requests with this id: Triton's way to cancel."""
        if not request_id:
            raise Mistake("A request id must be provided for request cancellation")
        self._abort_watch.stop(request_id)
        raise Mistake(CANCELLED, "CANCELLED")

    async def _prompt(self, llm_request: LlmRequest) -> tuple[Any, list[int] | None]:
        """The prompt for the library, and its tokens if the client sent no text."""
        tokens = llm_request.tokens
        if llm_request.messages is not None:
            tokens = await asyncio.to_thread(self._rendered, llm_request)
        if tokens is not None:
            return {"prompt_token_ids": tokens}, tokens
        text = llm_request.text or ""
        if len(text) < LONG_LETTERS or self._llm.tokenizer is None:
            return text, None
        return {
            "prompt_token_ids": await asyncio.to_thread(self._tokenised, text, llm_request)
        }, None

    def _tokenised(self, text: str, llm_request: LlmRequest) -> list[int]:
        """The tokens that the library would make of the text in the event loop."""
        special = llm_request.sampling.get("add_special_tokens", True)
        try:
            return list(self._tokenizer().encode(text, add_special_tokens=special))
        except Exception as error:  # a tokenizer is foreign code
            raise Mistake(f"{PREFIX}the tokenizer fails: {clean(error)}") from error

    def _rendered(self, llm_request: LlmRequest) -> list[int]:
        """Messages as tokens: as a text they would get the template's special tokens twice."""
        messages = readable(llm_request.messages or ())
        try:
            found = self._tokenizer().apply_chat_template(
                messages,
                **{"add_generation_prompt": True, **llm_request.template},
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # a template is foreign code
            raise Mistake(f"{PREFIX}the chat template fails: {clean(error)}") from error
        return [int(token) for token in found]

    def _echoed(self, llm_request: LlmRequest, tokens: list[int] | None) -> str:
        if not llm_request.echo:
            return ""
        return llm_request.text or "" if tokens is None else str(self._tokenizer().decode(tokens))

    def _decoded(self, token: int) -> str:
        return str(self._tokenizer().decode([token]))

    def _tokenizer(self) -> Any:
        found = self._llm.tokenizer
        if found is None:
            raise Mistake("the model has no tokenizer (skip_tokenizer_init)", "UNSUPPORTED")
        return found

    def _submit(self, prompt: Any, llm_request: LlmRequest) -> Any:
        sampling = dict(llm_request.sampling)
        adapter = self._adapters.take(llm_request, sampling)
        end_beside_words(sampling)
        try:
            if guide := guided(sampling):
                sampling["guided_decoding"] = self._library.GuidedDecodingParams(**guide)
            if "log_probs" in llm_request.outputs or "cumulative_logprob" in llm_request.outputs:
                sampling.setdefault("logprobs", 1)
            if "perf_metrics" in llm_request.outputs:
                sampling["return_perf_metrics"] = True
            return self._llm.generate_async(
                prompt,
                self._library.SamplingParams(**sampling),
                lora_request=adapter,
                streaming=llm_request.stream,
            )
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
            raise Mistake(PREFIX + clean(error)) from error
        except self._library.RequestError as error:
            raise Mistake(PREFIX + clean(error), "INTERNAL") from error
        except RuntimeError as error:  # an engine that has died
            end(error)

    async def _steps(
        self, running: RunningRequest, llm_request: LlmRequest
    ) -> AsyncGenerator[tuple[list[SequenceDelta], int, bool], None]:
        progress, made = DeltaReader(llm_request.sampling.get("max_tokens", DEFAULT_TOKENS)), 0
        outputs_of = self._outputs if llm_request.stream else self._output
        async with aclosing(outputs_of(running.result)) as outputs:
            async for output in outputs:
                deltas, final = progress.read(output), output.finished
                prompt_tokens = len(output.prompt_token_ids)
                if any(each.finish_reason == "cancelled" for each in deltas):
                    raise Mistake(CANCELLED, "CANCELLED")
                made += sum(each.tokens for each in deltas)
                if final:
                    self._metrics.finished(prompt_tokens, made)
                yield deltas, prompt_tokens, final

    async def _outputs(self, result: Any) -> AsyncGenerator[Any, None]:
        with self._failures():
            async for output in result:
                yield output

    async def _output(self, result: Any) -> AsyncGenerator[Any, None]:
        """The one output without a stream; iteration would stop at each sequence."""
        with self._failures():
            yield await result.aresult()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn exceptions of a result into refusals, or end the process."""
        try:
            yield
        except self._library.RequestError as error:
            raise Mistake(PREFIX + clean(error), "INTERNAL") from error
        except Exception as error:  # noqa: BLE001 - any other exception: the engine has died
            end(error)
