"""A request while this process answers it: the client's end."""

import asyncio
import logging
from contextlib import aclosing

from backends.vllm.engine_clients.kinds import Kind
from backends.vllm.engine_clients.messages import read_request, write_error, write_response
from gateway.backend import Instance
from gateway.errors import UNEXPECTED, InferenceError
from gateway.messages import InferResponse
from gateway.processes.call import ChannelCall
from gateway.processes.channel import Channel, Frame

log = logging.getLogger("sluice.vllm")


class ServedCall(ChannelCall):
    """Receives frames from its creation on; `task` runs it, and GONE or ABORT cancels that."""

    def __init__(self, channel: Channel, call: int, payload: bytes) -> None:
        super().__init__(channel, call)
        self.task: asyncio.Task[None] | None = None
        self._payload = payload
        self._is_gone = False
        channel.join(call, self)

    async def run(self, instance: Instance) -> None:
        """Have an instance answer; however that ends, the server gets the end of the call."""
        error: InferenceError | None = UNEXPECTED
        try:
            await self._answer(instance)
            error = None
        except InferenceError as found:
            error = found
        except Exception:
            # Around one request: the client learns nothing of what is in the log.
            log.exception("request failed unexpectedly")
        finally:
            if not self._is_gone:
                self._end(error)

    def lose(self) -> None:
        self._is_gone = True
        if self.task is not None:
            self.task.cancel()

    async def _answer(self, instance: Instance) -> None:
        request = read_request(self._payload)
        async with aclosing(instance.execute((request,))) as answers:
            async for _, answer in answers:
                if isinstance(answer, InferenceError):
                    raise answer
                if isinstance(answer, InferResponse):
                    self._send_data(write_response(answer))
                    if not self._window.has_room:
                        await self._window.room()

    def _end(self, error: InferenceError | None) -> None:
        if error is None:
            self._channel.send(Kind.END, self._call)
        else:
            self._channel.send(Kind.REFUSED, self._call, write_error(error))

    def _take(self, frame: Frame) -> None:
        if frame.kind in (Kind.GONE, Kind.ABORT):
            self.lose()
