"""A client process of a shared engine: it answers requests of the server."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from backends.vllm.engine import engine_config, new_client, started, stop_engine
from backends.vllm.engine_clients.messages import (
    ClientKind,
    ClientSettings,
    Offer,
    RecordSender,
    read_settings,
    write,
)
from backends.vllm.engine_clients.shared_engine import shared_counters
from backends.vllm.instance import VllmInstance
from backends.vllm.metrics import EngineMetrics
from backends.vllm.opening import engine_metrics, log_ready, open_engine, watched
from gateway.backend import Instance
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.processes.channel import Channel, Frame, number
from gateway.processes.error_messages import write_error
from gateway.processes.inference_calls import AnsweringEnd


class EngineClient:
    """Serves until the server closes the connection; created on the event loop."""

    def __init__(self) -> None:
        self._channel = Channel(self._on_frame)
        self._settings: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._tasks = asyncio.TaskGroup()
        self._instance: Instance | None = None

    async def run(self, connection: socket.socket) -> None:
        """Open the instance and serve; returns when all calls have ended."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._channel, sock=connection)
        if not await self._are_settings_received():
            return
        settings = read_settings(self._settings.result())
        _log_to(self._channel, debug=settings.debug)
        try:
            self._instance = await _open(settings, self._send_wasted)
        except InferenceError as error:
            self._channel.send(ClientKind.FAILED, payload=write_error(error))
            self._channel.close()
            return
        try:
            await self._serve(self._instance)
        finally:
            await self._instance.close()

    async def _are_settings_received(self) -> bool:
        """Wait for the settings; False if the server disconnects first."""
        lost = asyncio.ensure_future(self._channel.lost())
        await asyncio.wait((lost, self._settings), return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        return self._settings.done()

    async def _serve(self, instance: Instance) -> None:
        async with self._tasks as tasks:
            watching = tasks.create_task(self._send_stopped(instance))
            limits = (instance.max_model_len or 0, instance.places or 0)
            offer = Offer(tuple(instance.adapters), *limits)
            self._channel.send(ClientKind.READY, payload=write(offer))
            await self._channel.lost()
            watching.cancel()

    def _on_frame(self, frame: Frame) -> None:
        """Handle frames that start calls, and frames to the process."""
        if frame.kind == ClientKind.REQUEST and self._instance is not None:
            self._start_call(frame, self._instance)
        elif frame.kind == ClientKind.PING:
            self._channel.send(ClientKind.PONG)
        elif frame.kind == ClientKind.SETTINGS:
            self._settings.set_result(frame.payload)

    def _start_call(self, frame: Frame, instance: Instance) -> None:
        call = AnsweringEnd(self._channel, frame.call, frame.payload)
        call.task = self._tasks.create_task(call.run(partial(responses, instance)))
        call.task.add_done_callback(lambda _: self._channel.leave(frame.call))

    def _send_wasted(self, tokens: int) -> None:
        self._channel.send(ClientKind.WASTED, payload=number(tokens))

    async def _send_stopped(self, instance: Instance) -> None:
        if instance.death is not None:
            reason = await asyncio.shield(instance.death)
            self._channel.send(ClientKind.STOPPED, payload=reason.encode())


async def responses(
    instance: Instance, request: InferRequest
) -> AsyncGenerator[InferResponse, None]:
    """The responses of an instance to one request; its error is raised."""
    async with aclosing(instance.execute((request,))) as answers:
        async for _, answer in answers:
            if isinstance(answer, InferenceError):
                raise answer
            if isinstance(answer, InferResponse):
                yield answer


async def _open(settings: ClientSettings, wasted: Any) -> Instance:
    model, began = settings.model, time.monotonic()
    metrics = engine_metrics(model)
    llm = await started(model, partial(_join, settings, metrics), stop_engine)
    is_first = settings.index == 0
    async with watched(llm) as watch:
        engine = await open_engine(model, llm, watch, metrics, warms_up=is_first)
        if is_first:
            log_ready(engine, time.monotonic() - began)
        return VllmInstance(engine, wasted)


def _join(settings: ClientSettings, metrics: EngineMetrics | None) -> Any:
    """Join the engine as a client; blocks until it is ready."""
    model, index = settings.model, settings.index
    counted = {"_api_process_count": model.clients, "_api_process_rank": index}
    arguments, config = engine_config(model, **counted)
    listeners = {
        "input_listener": socket.socket(fileno=settings.input_fd),
        "output_listener": socket.socket(fileno=settings.output_fd),
    }
    counters = {"mp_admission_counters": shared_counters(Path(settings.counters))}
    client = new_client(
        arguments,
        config,
        metrics,
        client_addresses=settings.addresses | listeners | counters,
        client_count=model.clients,
        client_index=index,
    )
    if metrics is not None:
        metrics.order_by_step(client.engine_core)
    return client


def _log_to(channel: Channel, *, debug: bool) -> None:
    """Send log records of the gateway to the server; vLLM keeps its own log."""
    logger = logging.getLogger("sluice")
    logger.addHandler(RecordSender(partial(channel.send, ClientKind.LOG, 0)))
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False
    if not debug:
        logging.getLogger("vllm").setLevel(logging.WARNING)
