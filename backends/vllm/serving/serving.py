"""OpenAI's requests, answered by vLLM's own handlers over one engine."""

import asyncio
from argparse import Namespace
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from copy import copy
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.reasoning.abs_reasoning_parsers import ReasoningParserManager
from vllm.renderers import ChatParams
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from backends.vllm.engine_request import headers_of, is_timed, raise_if_cancelled
from backends.vllm.metrics import EngineMetrics
from backends.vllm.serving.chunk_template import chunk_template
from backends.vllm.serving.endpoints import SERVICES, EndpointService, check_body, check_size
from backends.vllm.serving.exchange import Exchange
from backends.vllm.serving.refusals import FAILURES, UNREADABLE, Refusals, encode
from backends.vllm.settings import REASONING_PARSER, TOOL_CALL_PARSER, EngineModel
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Parameter, Sink
from gateway.openai_contract import EVENT, REQUEST, RESPONSE, read_request
from gateway.policy.caller import tenant_of
from gateway.tensor import Datatype, Tensor

LARGE_BYTES = 1 << 16
"""Bodies above this size are read in a thread."""

DATA, END = "data: ", "\n\n"
DONE = f"{DATA}[DONE]{END}"
ERROR = f'{DATA}{{"error":'

Chunk = tuple[bytes, str]
"""One JSON text of a stream, and the name of its event, "" for none."""


class OpenAiServing:
    """Answers requests by vLLM's handlers, which are attributes of `state`."""

    def __init__(
        self,
        engine: Any,
        state: Any,
        refusals: Refusals,
        *,
        new_id: Callable[[], str],
        wasted: Callable[[int], None],
        metrics: EngineMetrics | None = None,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._state = state
        self._refusals = refusals
        self._new_id = new_id
        self._wasted = wasted

    async def answer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The responses to a request with a body in `openai_request`; the last one is final.

        Raises InferenceError, possibly after responses.
        """
        service, body = await self._read(request)
        tenant = tenant_of(request.caller)
        new = Exchange(self._engine, self._new_id, self._wasted, self._metrics, tenant)
        new.trace_headers = headers_of(request, self._engine)
        new.is_timed = is_timed(request)
        async with new as exchange:
            try:
                answer = await self._call(service, body, exchange, request.sink)
                if not hasattr(answer, "__anext__"):
                    yield self._whole(service, answer, exchange)
                    return
                await exchange.begin()
                # Chunks wait for the first output of the engine: its refusal must come first.
                # After the last output each waits for the next one: the last chunk is final.
                waiting: deque[Chunk] = deque()
                async with aclosing(answer) as parts:
                    async for part in parts:
                        if part == DONE:
                            continue
                        chunk = self._chunk(part, exchange)
                        exchange.latest_chunk = chunk[0]
                        waiting.append(chunk)
                        while exchange.begun and len(waiting) > exchange.finished:
                            yield _response(waiting.popleft(), exchange, final=False)
                while waiting:
                    chunk = waiting.popleft()
                    yield _response(chunk, exchange, final=not waiting)
            except FAILURES as error:
                raise self._refusals.explain(error, begun=exchange.begun) from error

    async def _read(self, request: InferRequest) -> tuple[EndpointService, Any]:
        try:
            if _size(request) > LARGE_BYTES:
                return await asyncio.to_thread(_read_body, request)
            return _read_body(request)
        except UNREADABLE as error:
            raise self._refusals.unreadable(error) from error

    async def _call(
        self, service: EndpointService, body: Any, exchange: Exchange, sink: Sink | None
    ) -> Any:
        handler = getattr(self._state, service.place, None)
        if handler is None:
            raise NotImplementedError(f"The model does not support {service.title} API")
        if hasattr(handler, "engine_client"):
            handler = copy(handler)
            handler.engine_client = exchange
            exchange.divert_to(sink, chunk_template(service, handler, body))
        answer = await service.method(handler, body, None)
        raise_if_cancelled()  # handlers treat it as a disconnect, and return
        if hasattr(answer, "error"):
            raise self._refusals.written(answer)
        return answer

    def _whole(self, service: EndpointService, answer: Any, exchange: Exchange) -> InferResponse:
        """The response to a request without a stream."""
        if hasattr(answer, "model_dump"):
            content = encode(answer.model_dump(**service.dumped))
            return _response((content, ""), exchange, final=True)
        if not hasattr(answer, "body"):
            raise InferenceError(
                Code.UNSUPPORTED, "answers in bytes are not offered: ask for 'float' or 'base64'"
            )
        return _response((bytes(answer.body), ""), exchange, final=True)

    def _chunk(self, part: Any, exchange: Exchange) -> Chunk:
        """The JSON text in a part of a handler's stream; raises the error that ends the stream."""
        if not isinstance(part, str):
            return part.model_dump_json(indent=None, by_alias=True).encode(), part.type
        if part.startswith(ERROR):
            raise self._failed(part, exchange)
        return part[len(DATA) : -len(END)].encode(), ""

    def _failed(self, part: str, exchange: Exchange) -> InferenceError:
        """The error that ends a stream; vLLM's own unless the engine has died."""
        written = self._refusals.streamed(part[len(DATA) : -len(END)])
        if exchange.failure is None:
            return written
        explained = self._refusals.explain(exchange.failure)
        return written if explained.code is written.code else explained


def _response(chunk: Chunk, exchange: Exchange, *, final: bool) -> InferResponse:
    content, event = chunk
    parameters: dict[str, Parameter] = {EVENT: event} if event else {}
    return InferResponse(
        outputs=(Tensor(RESPONSE, Datatype.BYTES, (1,), (content,)),),
        parameters=parameters,
        final=final,
        usage=exchange.usage(final=final),
        engine=exchange.stamps if final else None,
    )


def _read_body(request: InferRequest) -> tuple[EndpointService, Any]:
    read = read_request(request)
    if read is None:
        raise AssertionError("the request has no body")
    endpoint, body = read
    service = SERVICES[endpoint]
    check_size(endpoint, _size(request))
    check_body(body)
    found = service.body.validate_python(body)
    if request.id and service.named:
        found.request_id = request.id
    return service, found


def _size(request: InferRequest) -> int:
    given = request.input(REQUEST)
    if given is None:
        return 0
    return sum(map(len, given.data)) if isinstance(given.data, tuple) else len(given.data)


def check_parsers(model: EngineModel) -> None:
    """Refuse parsers that vLLM does not have, before the engine starts."""
    tools = model.openai.tool_call_parser
    _check(model.name, TOOL_CALL_PARSER, tools, ToolParserManager.list_registered())
    reasoning = str(model.arguments.get(REASONING_PARSER) or "")
    _check(model.name, REASONING_PARSER, reasoning, ReasoningParserManager.list_registered())


def _check(model: str, setting: str, name: str, known: Collection[str]) -> None:
    if name and name not in known:
        near = get_close_matches(name, known, n=3) or sorted(known)
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{model}': its {setting} is '{name}', which vLLM does not know; expected one "
            f"such as {', '.join(map(repr, near))}",
        )


async def open_handlers(engine: Any, model: EngineModel, tasks: Sequence[str]) -> Any:
    """The state of vLLM's own server, with its handlers as attributes.

    Its routes and its application are not created.
    """
    state = SimpleNamespace()
    arguments = await asyncio.to_thread(_prepare, engine, model)
    await init_app_state(engine, state, arguments, tuple(tasks))
    responses = getattr(state, "openai_serving_responses", None)
    if responses is not None:
        # Stored responses would never expire.
        responses.enable_store = False
    return state


def _prepare(engine: Any, model: EngineModel) -> Namespace:
    """The arguments; also fills vLLM's caches for conversations, which takes long."""
    template = model.openai.chat_template
    engine.renderer.warmup(ChatParams(template, chat_template_content_format="auto"))
    return _arguments(engine, model)


def _arguments(engine: Any, model: EngineModel) -> Namespace:
    """The arguments as `vllm serve` parses them."""
    settings, offered = model.openai, model.adapters.by_name or {}
    arguments: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    arguments.model = model.name
    others = [each for each in model.other_names if each not in offered]
    arguments.served_model_name = [model.name, *others]
    arguments.enable_log_requests = engine.log_requests
    arguments.structured_outputs_config = engine.vllm_config.structured_outputs_config
    # In the order of their numbers: vLLM numbers them in this order.
    arguments.lora_modules = [LoRAModulePath(each.name, each.path) for each in offered.values()]
    arguments.chat_template = settings.chat_template
    arguments.trust_request_chat_template = settings.trust_request_chat_template
    arguments.tool_call_parser = settings.tool_call_parser or None
    arguments.enable_auto_tool_choice = bool(settings.tool_call_parser)
    arguments.log_error_stack = False
    return arguments
