"""A thread with an event loop of its own, for a server in a program that is not asynchronous."""

import asyncio
import atexit
import threading
from concurrent.futures import Future
from contextlib import suppress

import uvloop

from gateway.errors import InferenceError
from gateway.in_process.server_loop import Home
from gateway.settings import Settings

CLOSE_SECS = 10.0
"""How long the end of a program waits for what comes after the drain of a forgotten server."""


class HomeThread(threading.Thread):
    """Ends with its home. It does not hold up the end of the program: that ends it, drained."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(name="sluice", daemon=True)
        self._settings = settings
        self._begun: Future[Home] = Future()
        self.start()
        self.home = self._begun.result()

    def run(self) -> None:
        """Run the loop until the home has ended."""
        atexit.register(self._end)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._live())
        finally:
            atexit.unregister(self._end)

    async def _live(self) -> None:
        try:
            home = Home(self._settings)
        except InferenceError as error:
            self._begun.set_exception(error)  # whoever starts the server is told, and nobody else
            return
        except BaseException as error:
            self._begun.set_exception(error)
            raise
        self._begun.set_result(home)
        await home.run()

    def _end(self) -> None:
        with suppress(InferenceError):
            self.home.post(self.home.server.stop)
        self.join(self._settings.exit_timeout_secs + CLOSE_SECS)
