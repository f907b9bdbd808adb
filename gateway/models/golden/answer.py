"""The responses of one golden request, and their comparison with the expected ones."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.models.golden.data import MOST_BYTES
from gateway.models.golden.tensor_checks import Mismatch, OutputChecks
from gateway.models.golden.text_checks import Similarity, Skipped, TextCheck, shown
from gateway.openai_contract import RESPONSE
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, Tensor


@dataclass(slots=True)
class GoldenAnswer:
    """The responses of a model, or its error; `problem` is set if they are too large."""

    responses: list[InferResponse] = field(default_factory=list)
    error: InferenceError | None = None
    problem: str = ""

    async def read(self, stream: ResponseStream) -> None:
        """Read a stream to its end, or until it has too many bytes."""
        size = 0
        with stream:
            try:
                async for response in stream:
                    self.error = self.error or response.error
                    self.responses.append(response)
                    size += sum(len(each.raw()) for each in response.outputs)
                    if size > MOST_BYTES:
                        self.problem = f"answer has more than {MOST_BYTES} bytes"
                        return
            except InferenceError as error:
                self.error = error

    def outputs(self, name: str) -> list[Tensor]:
        """The tensors of that output, one for each response with it."""
        found = [each.output(name) for each in self.responses]
        return [each for each in found if each is not None]

    def text(self, name: str) -> str:
        """The text in all elements of an output, or in OpenAI's answer; Mismatch without one."""
        if name == RESPONSE:
            content = self._choice().get("message", {}).get("content")
            return content if isinstance(content, str) else ""
        return b"".join(self._elements(name)).decode(errors="replace")

    def finish_reason(self, name: str) -> str:
        """The finish reason in OpenAI's answer, else that of the usage; "" without one."""
        if name == RESPONSE:
            return str(self._choice().get("finish_reason") or "")
        usages = [each.usage for each in self.responses if each.usage is not None]
        return next((each.finish_reason for each in reversed(usages) if each.finish_reason), "")

    def _elements(self, name: str) -> Iterator[bytes]:
        for each in self.outputs(name):
            if each.datatype is not Datatype.BYTES:
                raise Mismatch(f"output '{name}': datatype is {each.datatype}, expected BYTES")
            try:
                yield from each.elements()
            except InferenceError as error:
                raise Mismatch(f"output '{name}': {error.message}") from None

    def _choice(self) -> dict[str, Any]:
        text = b"".join(self._elements(RESPONSE))
        try:
            choice: dict[str, Any] = orjson.loads(text)["choices"][0]
            choice.get("message", {}).get("content")
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            start = shown(text.decode(errors="replace"))
            raise Mismatch(f"answer is no chat completion: {start}") from None
        return choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedError:
    """An error that a request must fail with; None is any code."""

    code: Code | None
    message: Sequence[TextCheck] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAnswer:
    """The checks of an answer; `text_output` has its text.

    The `tensors` and `texts` are the checks by output. An `error` has no other checks.
    """

    tensors: Mapping[str, OutputChecks]
    texts: Mapping[str, Sequence[TextCheck]]
    text_output: str = ""
    finish_reasons: tuple[str, ...] = ()
    error: ExpectedError | None = None

    async def check(self, answer: GoldenAnswer, similarity: Similarity) -> None:
        """Raise Mismatch for an answer that is not the expected one, or Skipped."""
        if answer.problem:
            raise Mismatch(answer.problem)
        if self.error is not None:
            await _check_error(self.error, answer.error, similarity)
            return
        if answer.error is not None:
            raise Mismatch(f"failed: {answer.error.reason}")
        await asyncio.to_thread(self._check_tensors, answer)
        if self.finish_reasons:
            found = answer.finish_reason(self.text_output)
            if found not in self.finish_reasons:
                expected = " or ".join(map(repr, self.finish_reasons))
                raise Mismatch(f"finish reason is '{found}', expected {expected}")
        await self._check_texts(answer, similarity)

    async def _check_texts(self, answer: GoldenAnswer, similarity: Similarity) -> None:
        """Make every check that can be made, before one is skipped."""
        skipped: Skipped | None = None
        for name, checks in self.texts.items():
            text = answer.text(name)
            for check in checks:
                try:
                    await check(text, similarity)
                except Skipped as found:
                    skipped = found
        if skipped is not None:
            raise skipped

    def _check_tensors(self, answer: GoldenAnswer) -> None:
        for name, check in self.tensors.items():
            found = answer.outputs(name)
            if len(found) != 1:
                raise Mismatch(f"output '{name}' is in {len(found)} responses, expected 1")
            try:
                check(found[0])
            except Mismatch as mismatch:
                raise Mismatch(f"output '{name}': {mismatch}") from None


async def _check_error(
    expected: ExpectedError, found: InferenceError | None, similarity: Similarity
) -> None:
    if found is None:
        raise Mismatch("was answered, expected an error")
    if expected.code is not None and found.code is not expected.code:
        raise Mismatch(f"failed: {found.reason}; expected {expected.code.value}")
    for check in expected.message:
        try:
            await check(found.message, similarity)
        except Mismatch as mismatch:
            raise Mismatch(f"error: {mismatch}") from None
