"""The instance: requests executed by one engine."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, get_type_hints

from prometheus_client.core import Metric
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams

from backends.vllm.engine import stop_engine
from backends.vllm.engine_processes import STOPPED, Watch
from backends.vllm.engine_request import (
    EngineRequest,
    cached_tokens,
    headers_of,
    is_timed,
    read_output,
)
from backends.vllm.failures import FAILURES, Failures, refusals
from backends.vllm.metrics import EngineMetrics
from backends.vllm.prompts import PromptRenderer
from backends.vllm.sampling import SamplingRules, casts_of
from backends.vllm.serving.refusals import Refusals
from backends.vllm.serving.serving import OpenAiServing
from backends.vllm.settings import PARAMETER, LoraAdapter, LoraAdapters
from gateway.backend import Answer, Instance
from gateway.errors import InferenceError
from gateway.generation import (
    EMBEDDING_REQUEST,
    MESSAGES,
    TEXT_INPUT,
    GenerationRequest,
    Transcript,
    invalid,
    read_generation,
)
from gateway.messages import InferRequest
from gateway.openai_contract import REQUEST
from gateway.policy.caller import tenant_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """A running AsyncLLM with its parts; `tasks` are those that its model supports.

    `handlers` is the state of vLLM's own server, with its handlers of OpenAI's requests.
    """

    model: str
    llm: Any
    watch: Watch
    tasks: frozenset[str]
    prompts: PromptRenderer
    adapters: LoraAdapters
    handlers: Any
    failures: Failures
    refusals: Refusals
    metrics: EngineMetrics | None


class VllmInstance(Instance):
    """Submits requests to an engine, which batches them in flight."""

    concurrency = None

    def __init__(self, engine: RunningEngine, wasted: Callable[[int], None]) -> None:
        self._engine = engine
        self._llm = engine.llm
        self._wasted = wasted
        self._watch = engine.watch
        self.death = engine.watch.death
        self._prompts = engine.prompts
        self.adapters = tuple(engine.adapters.by_name or ())
        self.max_model_len = engine.llm.model_config.max_model_len
        config = engine.llm.vllm_config
        replicas = config.parallel_config.data_parallel_size
        self.places = config.scheduler_config.max_num_seqs * replicas
        self._rules = SamplingRules(
            casts_of(get_type_hints(SamplingParams)), engine.llm.model_config.max_model_len
        )
        self._numbers = count(1)
        self._serving = OpenAiServing(
            engine.llm,
            engine.handlers,
            engine.refusals,
            new_id=self._new_id,
            wasted=wasted,
            metrics=engine.metrics,
        )

    @property
    def alive(self) -> bool:  # type: ignore[override]  # most need no property
        return not self._watch.over

    @property
    def metrics(self) -> Iterable[Metric]:
        return () if self._engine.metrics is None else self._engine.metrics.collect()

    def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        (request,) = requests  # without a limit of executions, each execution has one request
        if request.input(REQUEST) is None:
            return self._generate(request)
        return self._serve(request)

    async def _serve(self, request: InferRequest) -> AsyncGenerator[Answer, None]:
        """Answer a request with a body of OpenAI's."""
        try:
            for name in (TEXT_INPUT, MESSAGES, EMBEDDING_REQUEST):
                if request.input(name) is not None:
                    raise invalid(f"expected one of the inputs '{name}' and '{REQUEST}', got both")
            async with aclosing(self._serving.answer(request)) as responses:
                async for response in responses:
                    yield 0, response
        except InferenceError as error:
            yield 0, error
        finally:
            self._report_dead()

    async def _generate(self, request: InferRequest) -> AsyncGenerator[Answer, None]:
        """Answer a request with a text, a conversation, or an embedding request."""
        try:
            generation = read_generation(request)
            tenant = tenant_of(request.caller)
            metrics = self._engine.metrics
            started = EngineRequest(self._llm, self._new_id(), self._wasted, metrics, tenant)
            started.trace_headers = headers_of(request, self._llm)
            started.is_timed = is_timed(request)
            async with started as running:
                transcript = await self._submit(generation, running)
                sink = request.sink if transcript.is_of_one_text else None
                while not running.finished:
                    output = await running.next()
                    deltas = read_output(output, logprobs=generation.optional.logprobs)
                    count = len(output.prompt_token_ids)
                    cached, final = cached_tokens(output), output.finished
                    response = transcript.respond(deltas, count, final=final, cached_tokens=cached)
                    yield 0, replace(response, engine=running.stamps) if final else response
                    if sink is not None:
                        running.divert(partial(transcript.deliver, sink, count), sink)
                        sink = None
        except FAILURES as error:
            yield 0, self._engine.failures.explain(error)
        finally:
            self._report_dead()

    def _report_dead(self) -> None:
        if self._llm.errored:
            self._watch.report(STOPPED)

    async def close(self) -> None:
        self._watch.close()
        await stop_engine(self._llm)

    def kill(self, reason: str) -> None:
        self._watch.kill(reason)

    async def _submit(self, generation: GenerationRequest, running: EngineRequest) -> Transcript:
        if generation.embedding is not None:
            return await self._submit_embedding(generation, generation.embedding, running)
        self._require_task("generate")
        sampling = dict(generation.sampling)
        adapter = self._adapter(sampling)
        read = self._rules.read(sampling)
        kind = RequestOutputKind.DELTA if generation.stream else RequestOutputKind.FINAL_ONLY
        with refusals():
            parameters = SamplingParams(**read, output_kind=kind, skip_clone=True)
            prompt = await self._prompts.render(generation)
            await running.submit(prompt, parameters, lora_request=adapter)
        text = generation.text if generation.text is not None else prompt.get("prompt", "")
        return Transcript(generation, parameters.n, text)

    async def _submit_embedding(
        self, generation: GenerationRequest, embedding: Mapping[str, Any], running: EngineRequest
    ) -> Transcript:
        self._require_task("embed")
        with refusals():
            parameters = PoolingParams(task="embed", **_pooling(embedding))
            prompt = await self._prompts.render_prompt(_embedded(embedding))
            await running.submit(prompt, parameters)
        return Transcript(generation)

    def _adapter(self, sampling: dict[str, Any]) -> LoRARequest | None:
        if PARAMETER not in sampling:
            return None
        return lora_request(self._engine.adapters.select(sampling.pop(PARAMETER)))

    def _require_task(self, task: str) -> None:
        if task not in self._engine.tasks:
            raise invalid(f"Model {self._engine.model} does not support '{task}' request")

    def _new_id(self) -> str:
        return f"{self._engine.model}-{next(self._numbers)}"


def lora_request(adapter: LoraAdapter) -> LoRARequest:
    """The adapter as the engine expects it, for all kinds of requests."""
    return LoRARequest(adapter.name, adapter.number, adapter.path)


def _embedded(embedding: Mapping[str, Any]) -> str | list[int]:
    """The text or token ids to embed; vLLM checks the token ids."""
    given = embedding.get("input")
    if not isinstance(given, str | list):
        raise invalid("'input' of an embedding request must be a text or a list of token ids")
    return given


def _pooling(embedding: Mapping[str, Any]) -> dict[str, Any]:
    """The pooling parameters of an embedding request, whose values Triton wraps in lists."""
    given = embedding.get("pooling_params") or {}
    if not isinstance(given, Mapping) or not given.keys() <= {"dimensions"}:
        raise invalid("'pooling_params' must be an object with no other key than 'dimensions'")
    return {k: v[0] if isinstance(v, list) and len(v) == 1 else v for k, v in given.items()}
