"""One request from its inputs to its last response."""

import asyncio
import os
import traceback
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import triton_python_backend_utils as pb_utils

from .aborts import Live, Running
from .deltas import Gain, Progress
from .engine import Library
from .errors import Refusal, clean
from .messages import readable
from .metrics import Measures
from .model_file import Adapters
from .openai_response import ENDPOINT, REQUEST, OpenAiCall, read_call
from .outputs import Responses
from .parsers import Parsers
from .request import Asked, Inputs, end_beside_words, guided, read_asked, revises

PREFIX = "Error generating request: "
"""What Triton's model writes before the reason of a failed request."""
BROKEN = f"{PREFIX}the model's program failed; the server's log says how"
CANCELLED = "Request cancelled by client"
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
ENGINE_DIED = 70
LONG_LETTERS = 4096
"""From how many letters on a prompt takes longer to tokenise than others should wait."""
DEFAULT_TOKENS = 32
"""How many tokens the library makes unless told."""
Writer = Responses | OpenAiCall


@dataclass(frozen=True)
class Contract:
    """What of the model's config decides how requests are answered.

    `max_length` is how many tokens prompt and answer may have together, None if nobody says.
    """

    model: str
    decoupled: bool
    batched: bool
    max_length: int | None
    parsers: Parsers = field(default_factory=Parsers)


class Service:
    """Answers requests with an engine, any number at once, in one event loop."""

    def __init__(
        self,
        llm: Any,
        library: Library,
        contract: Contract,
        adapters: Adapters,
        live: Live,
        measures: Measures,
    ) -> None:
        self._llm, self._library, self._contract = llm, library, contract
        self._adapters, self._live, self._measures = adapters, live, measures

    async def answer(self, request: Any) -> None:
        """Send all responses to a request, or why there are none."""
        sender = request.get_response_sender()
        try:
            async with aclosing(self._responses(request, sender)) as responses:
                async for response, final in responses:
                    sender.send(response, FINAL if final else 0)
                    # One loop sends for all: `send` must not wait there for one who lags.
                    await sender.room()
        except Refusal as refusal:
            _fail(sender, refusal)
        except Exception as error:  # noqa: BLE001 - around one request
            pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
            _fail(sender, Refusal(BROKEN, "INTERNAL"))

    async def _responses(self, request: Any, sender: Any) -> AsyncGenerator[tuple[Any, bool], None]:
        inputs = Inputs(request)
        if inputs.flag("stop"):
            self._stop(request.request_id())
        asked, writer = self._read(inputs)
        prompt, tokens = await self._prompt(asked)
        if isinstance(writer, OpenAiCall):
            asked = writer.within(self._contract.max_length, tokens)
        else:
            writer.prefix = self._echoed(asked, tokens)
        result = self._submit(prompt, asked)
        running = Running(request.request_id(), sender.is_cancelled, result)
        with self._live.holding(running):
            async with aclosing(self._steps(running, asked)) as steps:
                async for gains, prompt_tokens, final in steps:
                    made = writer.responses(gains, prompt_tokens, final=final)
                    for number, response in enumerate(made, 1):
                        yield response, final and number == len(made)

    def _read(self, inputs: Inputs) -> tuple[Asked, Writer]:
        writer: Writer
        if REQUEST in inputs:
            names = self._adapters.names
            contract = self._contract
            call = read_call(inputs, contract.model, names, self._decoded, contract.parsers)
            asked, writer = call.asked, call
        else:
            inputs.text(ENDPOINT)  # says nothing without a request of OpenAI's
            asked = read_asked(inputs)
            writer = Responses(
                asked.outputs,
                self._decoded,
                with_logprobs=asked.sampling.get("logprobs") is not None,
                batched=self._contract.batched,
            )
        if asked.stream:
            self._check_stream(asked)
        return asked, writer

    def _check_stream(self, asked: Asked) -> None:
        if not self._contract.decoupled:
            raise Refusal("Streaming is only supported in decoupled mode.", "UNSUPPORTED")
        if revises(asked.sampling):
            raise Refusal(
                "beams, and a 'best_of' above the number of sequences, cannot be streamed: which "
                "of them are the answer is known only at the end",
                "UNSUPPORTED",
            )

    def _stop(self, request_id: str) -> None:
        """Triton's way to cancel: another request with the same id."""
        if not request_id:
            raise Refusal("A request id must be provided for request cancellation")
        self._live.stop(request_id)
        raise Refusal(CANCELLED, "CANCELLED")

    async def _prompt(self, asked: Asked) -> tuple[Any, list[int] | None]:
        """What the library takes as a prompt, and its tokens if the client gave no text."""
        tokens = asked.tokens
        if asked.messages is not None:
            tokens = await asyncio.to_thread(self._rendered, asked)
        if tokens is not None:
            return {"prompt_token_ids": tokens}, tokens
        text = asked.text or ""
        if len(text) < LONG_LETTERS or self._llm.tokenizer is None:
            return text, None
        return {"prompt_token_ids": await asyncio.to_thread(self._tokenised, text, asked)}, None

    def _tokenised(self, text: str, asked: Asked) -> list[int]:
        """What the library would make of the text, in the loop that serves all streams."""
        special = asked.sampling.get("add_special_tokens", True)
        try:
            return list(self._tokenizer().encode(text, add_special_tokens=special))
        except Exception as error:  # a tokenizer is anybody's code
            raise Refusal(f"{PREFIX}the tokenizer fails: {clean(error)}") from error

    def _rendered(self, asked: Asked) -> list[int]:
        """Messages as tokens: the template has the special tokens that a text would get again."""
        messages = readable(asked.messages or ())
        try:
            found = self._tokenizer().apply_chat_template(
                messages,
                **{"add_generation_prompt": True, **asked.template},
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # a template is anybody's code
            raise Refusal(f"{PREFIX}the chat template fails: {clean(error)}") from error
        return [int(token) for token in found]

    def _echoed(self, asked: Asked, tokens: list[int] | None) -> str:
        if not asked.echo:
            return ""
        return asked.text or "" if tokens is None else str(self._tokenizer().decode(tokens))

    def _decoded(self, token: int) -> str:
        return str(self._tokenizer().decode([token]))

    def _tokenizer(self) -> Any:
        found = self._llm.tokenizer
        if found is None:
            raise Refusal("the model has no tokenizer (skip_tokenizer_init)", "UNSUPPORTED")
        return found

    def _submit(self, prompt: Any, asked: Asked) -> Any:
        sampling = dict(asked.sampling)
        adapter = self._adapters.take(asked, sampling)
        end_beside_words(sampling)
        try:
            if guide := guided(sampling):
                sampling["guided_decoding"] = self._library.GuidedDecodingParams(**guide)
            if "log_probs" in asked.outputs or "cumulative_logprob" in asked.outputs:
                sampling.setdefault("logprobs", 1)
            if "perf_metrics" in asked.outputs:
                sampling["return_perf_metrics"] = True
            return self._llm.generate_async(
                prompt,
                self._library.SamplingParams(**sampling),
                lora_request=adapter,
                streaming=asked.stream,
            )
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
            raise Refusal(PREFIX + clean(error)) from error
        except self._library.RequestError as error:
            raise Refusal(PREFIX + clean(error), "INTERNAL") from error
        except RuntimeError as error:  # what an engine that has died says to whoever comes next
            _end(error)

    async def _steps(
        self, running: Running, asked: Asked
    ) -> AsyncGenerator[tuple[list[Gain], int, bool], None]:
        progress, made = Progress(asked.sampling.get("max_tokens", DEFAULT_TOKENS)), 0
        outputs_of = self._outputs if asked.stream else self._output
        async with aclosing(outputs_of(running.result)) as outputs:
            async for output in outputs:
                gains, final = progress.read(output), output.finished
                prompt_tokens = len(output.prompt_token_ids)
                if any(each.finish_reason == "cancelled" for each in gains):
                    raise Refusal(CANCELLED, "CANCELLED")
                made += sum(each.tokens for each in gains)
                if final:
                    self._measures.finished(prompt_tokens, made)
                yield gains, prompt_tokens, final

    async def _outputs(self, result: Any) -> AsyncGenerator[Any, None]:
        with self._failures():
            async for output in result:
                yield output

    async def _output(self, result: Any) -> AsyncGenerator[Any, None]:
        """The one output without a stream: iterating would stop at each sequence."""
        with self._failures():
            yield await result.aresult()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """What a result may raise."""
        try:
            yield
        except self._library.RequestError as error:
            raise Refusal(PREFIX + clean(error), "INTERNAL") from error
        except Exception as error:  # noqa: BLE001 - whatever else a result raises: the engine died
            _end(error)


def _fail(sender: Any, refusal: Refusal) -> None:
    error = pb_utils.TritonError(str(refusal), getattr(pb_utils.TritonError, refusal.code))
    sender.send(pb_utils.InferenceResponse(error=error), FINAL)


def _end(error: BaseException) -> NoReturn:
    """End the process, so that the gateway answers for it and starts another."""
    text = "".join(traceback.format_exception(error))
    print(f"the engine has died: {text}", flush=True)  # noqa: T201 - the gateway logs it
    os._exit(ENGINE_DIED)
