"""One request while it is in the engine."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from vllm.exceptions import VLLMError

from backends.vllm.grammar_time import SECS as GRAMMAR_SECS
from backends.vllm.grammars import check_constraint
from backends.vllm.output import count_tokens, failed
from gateway.errors import Code, InferenceError

ABORT_TIMEOUT_SECS = 2.0
CANNOT_FOLLOW = (
    "the engine cannot follow the 'structured_outputs' of the request, or not prepare that within "
    f"{GRAMMAR_SECS:g} s"
)


class EngineRequest:
    """One request in the engine, from `submit` to its last output; used in an `async with`.

    Leaving the block before the last output aborts the request at once, and tells `wasted` how
    many tokens the engine had delivered that nobody has read: with streaming those since the last
    output, else all of them. What it makes until the abort reaches it, about one step, is not
    known and not counted.
    """

    def __init__(self, engine: Any, request_id: str, wasted: Callable[[int], None]) -> None:
        self.finished = False
        self._engine = engine
        self._id = request_id
        self._wasted = wasted
        self._outputs: Any = None
        self._constrained = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.leave()

    async def leave(self) -> None:
        """What the end of the block does, for those who cannot use one."""
        if self._outputs is not None and not self.finished and not self._engine.errored:
            await self._abort()

    async def submit(self, prompt: Any, parameters: Any, **options: Any) -> None:
        """Hand the request to the engine, which checks it first and raises what is wrong.

        The options are those of `AsyncLLM.add_request`.
        """
        constraint = getattr(parameters, "structured_outputs", None)
        self._constrained = constraint is not None
        check_constraint(constraint)
        try:
            self._outputs = await self._engine.add_request(self._id, prompt, parameters, **options)
        except BaseException:
            # It may be registered already, and then only the abort by this id forgets it.
            await self._abort_within_limit(self._id, internal=False)
            raise

    async def next(self) -> Any:
        """What the engine has made since the last call; waits until there is something.

        Raises InferenceError when the engine has given the request up.
        """
        output = self._outputs.get_nowait() or await self._outputs.get()
        if output.finished:
            self.finished = True
            if failed(output):
                raise self._failure()
        return output

    def _failure(self) -> InferenceError:
        # vLLM's checks let some grammars pass that its engine cannot compile or follow.
        if self._constrained:
            return InferenceError(Code.INVALID_ARG, CANNOT_FOLLOW)
        return InferenceError(Code.INTERNAL, "the engine failed while it worked on the request")

    async def _abort(self) -> None:
        await self._abort_within_limit(self._outputs.request_id, internal=True)
        with suppress(VLLMError):
            self._wasted(count_tokens(self._outputs.get_nowait()))

    async def _abort_within_limit(self, request_id: str, *, internal: bool) -> None:
        """Abort in a task of its own: the caller's may be cancelled, and then has no timeouts."""
        abort = asyncio.ensure_future(self._engine.abort(request_id, internal=internal))
        try:
            await asyncio.wait((abort,), timeout=ABORT_TIMEOUT_SECS)
        finally:
            if not abort.done():
                abort.cancel()
                await asyncio.wait((abort,))
        if not abort.cancelled() and not isinstance(abort.exception(), VLLMError):
            abort.result()
