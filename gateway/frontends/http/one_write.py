"""The head of an answer and its body, sent in one write.

uvicorn writes them apart; each write to a local client costs more than all that the gateway does
for a small request, and wakes the client twice.
"""

import asyncio
from typing import Any

HOLD_HEAD = "sluice.hold_head"
"""Where a request's state has the call that holds back its answer's head until the body comes."""


class OneWrite:
    """A transport that can hold back one write until the next; all else is the transport's own.

    Whoever calls `hold` writes twice before anything waits.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._holding = False
        self._held = b""

    def hold(self) -> None:
        """Keep what is written next, and send it together with what is written after it."""
        self._holding = True

    def write(self, data: bytes) -> None:
        """Write, or hold back."""
        if self._holding:
            self._holding, self._held = False, data
        elif self._held:
            held, self._held = self._held, b""
            self._transport.writelines((held, data))
        else:
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
