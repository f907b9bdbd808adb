"""From the tensors of a request to sequences in the engine."""

import asyncio
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from sluice_llm.chat import readable
from sluice_llm.request import Inputs, LlmRequest, Mistake
from sluice_llm.responses import ENDPOINT, REQUEST, OpenAiCall, TensorResponses, Writer, read_call
from sluice_llm.running import CANCELLED, ModelContract, answering

from .engine import GenAiLibrary, reason
from .generation import AnswerSequence, RunningGeneration
from .loop import GenerationLoop
from .model_file import BLOCK_TOKENS
from .request import checked, read_request, with_default
from .sampling import DEFAULT_TOKENS, Sampling, configuration, read_sampling
from .structures import StructureCheck
from .tokens import Tokens

LONG_LETTERS = 4096
"""Prompts from this length on are tokenised in a thread."""


class GenAiService:
    """Reads requests and adds them to the engine; `blocks` are those of its cache."""

    def __init__(
        self,
        library: GenAiLibrary,
        pipeline: Any,
        tokens: Tokens,
        contract: ModelContract,
        blocks: int,
        loop: GenerationLoop,
    ) -> None:
        self._library, self._pipeline = library, pipeline
        self._tokens, self._contract, self._blocks = tokens, contract, blocks
        self._loop = loop
        self._structures = StructureCheck()
        self._numbers = itertools.count(1)

    def close(self) -> None:
        """End the process that checks structures."""
        self._structures.close()

    def accept(self, request: Any) -> None:
        """Add a request to the engine, at once or, if something of it takes time, later."""
        sender = request.get_response_sender()
        llm_request, writer = self._read(Inputs(request))
        counted = "cumulative_logprob" in llm_request.outputs
        sampling = read_sampling(llm_request.sampling, counted=counted)
        structure = sampling.structure
        known = structure is None or self._structures.knows(structure)
        if known and _letters(llm_request) < LONG_LETTERS:
            self._add(sender, llm_request, writer, sampling, self._prompt(llm_request))
        else:
            self._loop.start(self._add_later(sender, llm_request, writer, sampling))

    async def _add_later(
        self, sender: Any, llm_request: LlmRequest, writer: Writer, sampling: Sampling
    ) -> None:
        with answering(sender):
            if sampling.structure is not None:
                await self._structures.check(sampling.structure)
            prompt = await asyncio.to_thread(self._prompt, llm_request)
            if sender.is_cancelled():
                raise Mistake(CANCELLED, "CANCELLED")
            self._add(sender, llm_request, writer, sampling, prompt)

    def _read(self, inputs: Inputs) -> tuple[LlmRequest, Writer]:
        if REQUEST in inputs:
            contract = self._contract
            call = read_call(inputs, contract.model, (), self._tokens.text, contract.parsers)
            if not call.chat:
                call.llm_request = with_default(call.llm_request, DEFAULT_TOKENS)
            if call.top == 0:  # the chosen token only
                found = {**call.llm_request.sampling, "logprobs": 0}
                call.llm_request = replace(call.llm_request, sampling=found)
            return call.llm_request, call
        inputs.text(ENDPOINT)  # has no effect without an OpenAI request
        llm_request = with_default(read_request(inputs), DEFAULT_TOKENS)
        writer = TensorResponses(
            llm_request.outputs,
            self._tokens.text,
            with_logprobs=llm_request.sampling.get("logprobs") is not None,
            batched=False,
            counts=np.uint32,
        )
        return llm_request, writer

    def _prompt(self, llm_request: LlmRequest) -> list[int]:
        if llm_request.tokens is not None:
            if wrong := [each for each in llm_request.tokens if not 0 <= each < self._tokens.size]:
                raise Mistake(
                    f"'prompt' has the token {wrong[0]}, expected 0 to {self._tokens.size - 1}"
                )
            return list(llm_request.tokens)
        if llm_request.messages is not None:
            messages = checked(readable(llm_request.messages))
            return self._tokens.of_chat(messages, llm_request.template)
        return self._tokens.of_text(llm_request.text or "")

    def _add(
        self,
        sender: Any,
        llm_request: LlmRequest,
        writer: Writer,
        sampling: Sampling,
        prompt: list[int],
    ) -> None:
        room = self._room(len(prompt), sampling.max_tokens or 0)
        if not isinstance(writer, OpenAiCall) and llm_request.echo:
            writer.prefix = llm_request.text or self._tokens.joined(prompt)
        most = min(room, sampling.max_tokens or room)
        sequences = []
        for index in range(sampling.count):
            config = configuration(self._library.genai, sampling, index, self._tokens, most)
            add = partial(self._handle, prompt, config)
            sequences.append(AnswerSequence(index, add, sampling, self._tokens))
        generation = RunningGeneration(sender, writer, sequences, len(prompt))
        generation.stream, generation.room = llm_request.stream, room
        self._loop.add(generation)

    def _handle(self, prompt: list[int], config: Any) -> Any:
        number, tokens = next(self._numbers), self._library.prompt(prompt)
        try:
            return self._pipeline.add_request(number, tokens, config)
        except RuntimeError as error:
            raise Mistake(reason(error)) from error

    def _room(self, prompt: int, wanted: int) -> int:
        """The new tokens for which there is room; Mistake if there is none, or never for these."""
        if not prompt:
            raise Mistake("the prompt has no tokens, expected at least 1")
        cache = self._blocks * BLOCK_TOKENS
        limit = self._contract.max_length or cache
        if wanted > limit:
            raise Mistake(
                f"sampling parameter 'max_tokens' is {wanted}, expected at most {limit}: the "
                "model's limit of prompt and answer"
            )
        longest = min(cache, limit)
        if prompt >= longest:
            why = f"the model's cache has {self._blocks} blocks of {BLOCK_TOKENS} tokens"
            if longest < cache:
                why = f"the model's limit of prompt and answer is {longest} tokens"
            raise Mistake(f"the prompt has {prompt} tokens, expected at most {longest - 1}: {why}")
        return longest - prompt


def _letters(llm_request: LlmRequest) -> int:
    if llm_request.messages is not None:
        return sum(len(str(each)) for each in llm_request.messages)
    return len(llm_request.text or "")
