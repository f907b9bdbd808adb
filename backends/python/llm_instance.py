"""One instance of an LLM in a worker: token counts of its responses become usage."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from gateway.backend import Answer, ForwardingInstance, Instance
from gateway.errors import AnsweredError, InferenceError
from gateway.messages import InferRequest, InferResponse, Usage

USAGE = "sluice_usage"
"""The response parameter with prompt tokens, new tokens and the finish reason."""


class LlmInstance(ForwardingInstance):
    """Sends every request to the worker at once, and reads token counts from its responses."""

    def __init__(self, worker: Instance) -> None:
        super().__init__(worker)
        self.concurrency = None

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        inner = [replace(request, sink=None) for request in requests]
        async with aclosing(self._inner.execute(inner)) as answers:
            async for index, answer in answers:
                if isinstance(answer, InferResponse):
                    yield index, _with_usage(answer)
                elif isinstance(answer, AnsweredError):
                    # The program refuses in the name of the backend: the request has failed.
                    yield index, InferenceError(answer.code, answer.message)
                else:
                    yield index, answer


def _with_usage(response: InferResponse) -> InferResponse:
    """The response with its usage, and without the internal parameter."""
    usage = response.parameters.get(USAGE)
    if usage is None:
        return response
    prompt, new, reason = str(usage).split(",")
    return replace(
        response,
        parameters={k: v for k, v in response.parameters.items() if k != USAGE},
        usage=Usage(prompt_tokens=int(prompt), completion_tokens=int(new), finish_reason=reason),
    )
