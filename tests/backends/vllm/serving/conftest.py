"""An engine that a test scripts, for what needs none of the real one."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(slots=True)
class Completion:
    """An output of vLLM for one sequence."""

    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    text: str = ""


@dataclass(slots=True)
class Output:
    """An output of vLLM for one request."""

    outputs: list[Completion]
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    finished: bool = False
    num_cached_tokens: int | None = None


def made(tokens: int, reason: str | None = None, index: int = 0) -> Output:
    """An output with `tokens` tokens of one sequence; the last if there is a reason."""
    completion = Completion([7] * tokens, index, reason)
    return Output([completion], finished=reason is not None)


class Outputs:
    """Stands for vLLM's collector of one request's outputs."""

    def __init__(self, request_id: str, told: list[Any]) -> None:
        self.request_id = request_id
        self._told = deque(told)

    def get_nowait(self) -> Any:
        if not self._told:
            return None
        output = self._told.popleft()
        if isinstance(output, Exception):
            raise output
        return output

    async def get(self) -> Any:
        await asyncio.Event().wait()


class ScriptedEngine:
    """Stands for AsyncLLM: answers each request with what the next script has."""

    errored = False

    def __init__(self, *scripts: list[Any]) -> None:
        self.added: list[tuple[str, Any, Any, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self._scripts = deque(scripts)

    async def add_request(
        self, request_id: str, prompt: Any, parameters: Any, **options: Any
    ) -> Any:
        self.added.append((request_id, prompt, parameters, options))
        script = self._scripts.popleft()
        if isinstance(script, Exception):
            raise script
        return Outputs(request_id, script)

    async def abort(self, request_id: str, internal: bool = False) -> None:
        self.aborted.append(request_id)


@pytest.fixture(autouse=True)
def imported(store: Path) -> Path:
    """vLLM, imported as the gateway does it."""
    return store


@pytest.fixture
def numbered() -> Callable[[], str]:
    """New ids: 1, 2, ..."""
    numbers = iter(range(1, 1000))
    return lambda: str(next(numbers))
