"""Parts of the model.py of an LLM: the event loop of its engine, its config and its errors."""

import asyncio
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import triton_python_backend_utils as pb_utils
from sluice_worker.errors import BadAnswer

from .request import Mistake


class EngineLoop:
    """The event loop of the engine's requests: a thread for the life of the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[Future[Any]] = set()
        threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run it concurrently; its exception is logged."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._tasks.add(future)
        future.add_done_callback(self._ended)

    def stop(self) -> None:
        """Stop the loop; unfinished coroutines stay suspended."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _ended(self, future: "Future[Any]") -> None:
        self._tasks.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            pb_utils.Logger.log_error("".join(traceback.format_exception(error)))


@contextmanager
def importing(
    package: str, how_to_install: str, explain: Callable[[BaseException], str]
) -> Iterator[None]:
    """Turn errors of the block's imports into a Mistake."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise Mistake(
            f"its environment has no package '{error.name}'; {how_to_install}", "UNAVAILABLE"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise Mistake(f"{package} cannot be imported: {explain(error)}") from error


def parameter(config: dict[str, Any], name: str) -> str:
    """The text of a parameter of the model's config; "" without it."""
    return str(config.get("parameters", {}).get(name, {}).get("string_value", ""))


def for_model(name: str, refusal: Mistake) -> BadAnswer:
    """The error that the gateway reports unchanged."""
    return BadAnswer(f"model '{name}': {refusal}")
