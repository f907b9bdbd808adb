"""The stream of events of rollouts. Few servers have readers of it: the first one imports this."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from gateway.rollouts.events import RolloutEvent

PING_SECS = 15
SEND_TIMEOUT_SECS = 30

log = logging.getLogger("sluice.http")


class RolloutEventsResponse(EventSourceResponse):
    """A stream of events; a client that reads nothing for SEND_TIMEOUT_SECS is dropped."""

    def __init__(self, events: AsyncGenerator[RolloutEvent]) -> None:
        super().__init__(_sent(events), ping=PING_SECS, send_timeout=SEND_TIMEOUT_SECS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.warning("reader of events dropped", extra={"secs": SEND_TIMEOUT_SECS})


async def _sent(events: AsyncGenerator[RolloutEvent]) -> AsyncIterator[ServerSentEvent]:
    async with aclosing(events):
        async for event in events:
            data = msgspec.json.encode(event.data).decode()
            yield ServerSentEvent(data, event=event.kind.value, id=event.id or None)
