"""The answers of an instance in a client process."""

from collections.abc import AsyncGenerator, Sequence

import pytest

from backends.vllm.engine_clients.client import responses
from gateway.backend import Answer, Instance, Note
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from tests.builders import soon, text_request, text_response, texts


class Scripted(Instance):
    """Yields given answers."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self.closed = False

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        assert len(requests) == 1
        try:
            for answer in self._answers:
                yield answer
        finally:
            self.closed = True

    async def close(self) -> None:
        """There is nothing to release."""


async def read(instance: Instance) -> list[str]:
    return texts([each async for each in responses(instance, text_request())])


async def test_responses_come_without_the_notes_between_them() -> None:
    first, last = text_response("first"), text_response("", final=True)
    assert await soon(read(Scripted((0, first), (0, Note.FREED), (0, last)))) == ["first", ""]


async def test_an_error_is_raised_and_ends_the_execution() -> None:
    error = InferenceError(Code.NOT_FOUND, "no such adapter")
    instance = Scripted((0, text_response("first")), (0, error), (0, text_response("more")))
    with pytest.raises(InferenceError, match="no such adapter"):
        await soon(read(instance))
    assert instance.closed
