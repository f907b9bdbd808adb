"""Sleep of an engine: vLLM's levels 1 and 2 (its page "Sleep Mode")."""

from typing import Any

from backends.vllm.engine_processes import Watch

LEVELS = {"level_1": 1, "level_2": 2}
"""The levels by the value of the model's parameter `sleep`."""

DROPS_WEIGHTS = 2


class EngineSleeper:
    """Frees the GPU memory of an engine. Implements `Sleeper`.

    Level 1 keeps the weights in pinned memory of the host. Level 2 drops them, and loads them again
    between the two halves of the wake: an engine whose cache is back before its weights answers
    with gibberish (vLLM issue 29341).
    """

    def __init__(self, llm: Any, watch: Watch, level: int) -> None:
        self._llm = llm
        self._watch = watch
        self._level = level

    async def sleep(self) -> None:
        """Free the memory once no request is left in the engine."""
        await self._watch.unless_ended(self._llm.sleep(level=self._level, mode="wait"))

    async def wake(self) -> None:
        """Take the memory again, with the weights."""
        if self._level < DROPS_WEIGHTS:
            await self._watch.unless_ended(self._llm.wake_up())
            return
        await self._watch.unless_ended(self._llm.wake_up(["weights"]))
        await self._watch.unless_ended(self._llm.collective_rpc("reload_weights"))
        await self._watch.unless_ended(self._llm.wake_up(["kv_cache"]))
