"""OpenAI's requests, served by vLLM's own handlers over one engine."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from backends.vllm.serving.endpoints import SERVICES, Service
from backends.vllm.serving.exchange import Exchange
from backends.vllm.serving.limits import check_body, check_size
from backends.vllm.serving.refusals import FAILURES, UNREADABLE, Refusals, encode
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Parameter
from gateway.openai_exchange import EVENT, REQUEST, RESPONSE, read_request
from gateway.tensor import Datatype, Tensor

LARGE_BYTES = 1 << 16
"""A body from which on reading it would hold up others."""

DATA, END = "data: ", "\n\n"
DONE = f"{DATA}[DONE]{END}"
ERROR = f'{DATA}{{"error":'

Chunk = tuple[bytes, str]
"""One JSON text of a stream, and the name of its event, "" for none."""


class OpenAiServing:
    """Answers requests with what vLLM's handlers, which `state` has, make of them."""

    def __init__(
        self,
        engine: Any,
        state: Any,
        refusals: Refusals,
        *,
        new_id: Callable[[], str],
        wasted: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._state = state
        self._refusals = refusals
        self._new_id = new_id
        self._wasted = wasted

    async def answer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The responses to a request that has a body in `openai_request`; the last is final.

        Raises InferenceError, also after responses.
        """
        service, body = await self._read(request)
        async with Exchange(self._engine, self._new_id, self._wasted) as exchange:
            try:
                answer = await self._call(service, body, exchange)
                if not hasattr(answer, "__anext__"):
                    yield self._whole(service, answer, exchange)
                    return
                await exchange.begin()
                async with aclosing(self._chunks(answer, exchange)) as chunks:
                    async for response in _responses(chunks, exchange):
                        yield response
            except FAILURES as error:
                raise self._refusals.explain(error, begun=exchange.begun) from error

    async def _read(self, request: InferRequest) -> tuple[Service, Any]:
        try:
            if _size(request) > LARGE_BYTES:
                return await asyncio.to_thread(_read_body, request)
            return _read_body(request)
        except UNREADABLE as error:
            raise self._refusals.unreadable(error) from error

    async def _call(self, service: Service, body: Any, exchange: Exchange) -> Any:
        answer = await service.call(self._state, body, exchange)
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError  # handlers take it for a client's leave, and return
        if hasattr(answer, "error"):
            raise self._refusals.told(answer)
        return answer

    def _whole(self, service: Service, answer: Any, exchange: Exchange) -> InferResponse:
        """The response to a request without a stream."""
        if hasattr(answer, "model_dump"):
            content = encode(answer.model_dump(**service.dumped))
            return _response((content, ""), exchange, final=True)
        if not hasattr(answer, "body"):
            raise InferenceError(
                Code.UNSUPPORTED, "answers in bytes are not offered: ask for 'float' or 'base64'"
            )
        return _response((bytes(answer.body), ""), exchange, final=True)

    async def _chunks(self, answer: Any, exchange: Exchange) -> AsyncGenerator[Chunk, None]:
        """What a handler's stream says, without the frames of its events."""
        async with aclosing(answer) as parts:
            async for part in parts:
                if not isinstance(part, str):
                    yield part.model_dump_json(indent=None, by_alias=True).encode(), part.type
                elif part.startswith(ERROR):
                    raise self._failed(part, exchange)
                elif part != DONE:
                    yield part[len(DATA) : -len(END)].encode(), ""

    def _failed(self, part: str, exchange: Exchange) -> InferenceError:
        """For the error that ends a stream, in vLLM's words unless the engine has died."""
        told = self._refusals.streamed(part[len(DATA) : -len(END)])
        if exchange.failure is None:
            return told
        explained = self._refusals.explain(exchange.failure)
        return told if explained.code is told.code else explained


async def _responses(
    chunks: AsyncIterator[Chunk], exchange: Exchange
) -> AsyncGenerator[InferResponse, None]:
    """One response for each chunk.

    Before the engine has made anything they wait, so that its refusal comes first. Once it has
    made all, each waits for the next, which is there already: the last one is final.
    """
    waiting: deque[Chunk] = deque()
    async for chunk in chunks:
        waiting.append(chunk)
        while exchange.begun and len(waiting) > exchange.finished:
            yield _response(waiting.popleft(), exchange, final=False)
    while waiting:
        chunk = waiting.popleft()
        yield _response(chunk, exchange, final=not waiting)


def _response(chunk: Chunk, exchange: Exchange, *, final: bool) -> InferResponse:
    content, event = chunk
    parameters: dict[str, Parameter] = {EVENT: event} if event else {}
    return InferResponse(
        outputs=(Tensor(RESPONSE, Datatype.BYTES, (1,), (content,)),),
        parameters=parameters,
        final=final,
        usage=exchange.usage(final=final),
    )


def _read_body(request: InferRequest) -> tuple[Service, Any]:
    read = read_request(request)
    if read is None:
        raise AssertionError("a request without a body came here")
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
