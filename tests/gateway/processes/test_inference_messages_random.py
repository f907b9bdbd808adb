"""Random requests and responses are read as they were written. A failure names the seed."""

import math
import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from gateway.errors import AnsweredError, Code, InferenceError
from gateway.messages import (
    InferRequest,
    InferResponse,
    Phases,
    RequestedOutput,
    RoutedPrompt,
    SequenceTag,
    Usage,
)
from gateway.openai_contract import OpenAiRefusal
from gateway.policy.caller import Caller
from gateway.processes.inference_messages import (
    read_request,
    read_response,
    write_request,
    write_response,
)
from gateway.processes.request_terms import TraceParent
from gateway.tensor import SIZES, Datatype, Tensor, join_elements

T = TypeVar("T")

ROUNDS = 100
LARGEST = (1 << 64) - 1


class Dice(random.Random):
    """Random parts of messages."""

    def maybe(self, make: Callable[[], T]) -> T | None:
        return make() if self.random() < 0.5 else None

    def several(self, make: Callable[[], T]) -> tuple[T, ...]:
        return tuple(make() for _ in range(self.randint(0, 3)))

    def text(self) -> str:
        return "".join(self.choices("a é\0'日😀", k=self.randint(0, 6)))

    def size(self) -> int:
        return self.choice((0, 1, self.randint(0, 1000), LARGEST))

    def parameter(self, depth: int = 0) -> Any:
        plain = (self.text(), self.size(), -self.randint(1, 1 << 63), self.random(), True, False)
        if depth > 2:
            return self.choice(plain)
        nested = [self.parameter(depth + 1)]
        return self.choice((*plain, None, math.inf, nested, {self.text(): nested}))

    def shape(self) -> tuple[int, ...]:
        return self.several(lambda: self.choice((1, 1, 2, 3, 0)))

    def tensor(self, datatype: Datatype) -> Tensor:
        shape = self.shape()
        count = math.prod(shape)
        if datatype is not Datatype.BYTES:
            data = self.randbytes(count * SIZES[datatype])
            return Tensor(self.text(), datatype, shape, self.choice((data, memoryview(data))))
        elements = tuple(self.randbytes(self.choice((0, 1, 5, 300))) for _ in range(count))
        return Tensor(
            self.text(), datatype, shape, self.choice((elements, join_elements(elements)))
        )

    def tensors(self, datatype: Datatype) -> tuple[Tensor, ...]:
        return self.several(lambda: self.tensor(datatype))

    def error(self) -> InferenceError:
        code = self.choice(tuple(Code))
        refusal = OpenAiRefusal(code, self.text(), status=self.randint(1, 599), body=b"{}")
        return self.choice(
            (refusal, InferenceError(code, self.text()), AnsweredError(code, self.text()))
        )

    def trace(self) -> TraceParent:
        return TraceParent(f"00-{self.randbytes(16).hex()}-{self.randbytes(8).hex()}-01")

    def request(self, datatype: Datatype) -> InferRequest:
        caller = self.maybe(lambda: Caller(tenant="a"))
        identity = self.choice((self.randint(1, LARGEST), "conversation"))
        flags = self.random() < 0.5, self.random() < 0.5
        return InferRequest(
            model=self.text(),
            version=self.text(),
            id=self.text(),
            inputs=self.tensors(datatype),
            outputs=self.several(lambda: RequestedOutput(self.text(), self.size())),
            parameters=dict(self.several(lambda: (self.text(), self.parameter()))),
            sequence=self.maybe(
                lambda: SequenceTag(identity, *flags, caller.tenant if caller else "")
            ),
            priority=self.size(),
            timeout_us=self.size(),
            trace=self.maybe(self.trace),
            caller=caller,
            prompt=self.maybe(
                lambda: RoutedPrompt(self.size(), self.several(lambda: self.randbytes(8)))
            ),
        )

    def response(self, datatype: Datatype) -> InferResponse:
        values = (self.text(), self.size(), self.random(), True)
        return InferResponse(
            outputs=self.tensors(datatype),
            parameters=dict(self.several(lambda: (self.text(), self.choice(values)))),
            final=self.random() < 0.5,
            usage=self.maybe(lambda: Usage(self.size(), self.size(), self.text())),
            phases=self.maybe(lambda: Phases(self.size(), self.size(), self.size())),
            error=self.maybe(self.error),
        )


SEEDS = range(ROUNDS)


def parts(error: InferenceError | None) -> object:
    """The parts in which equal errors agree."""
    return None if error is None else (type(error), vars(error))


@pytest.mark.parametrize("datatype", Datatype)
def test_a_request_is_read_as_it_was_written(datatype: Datatype) -> None:
    for seed in SEEDS:
        sent = Dice(seed).request(datatype)
        found = read_request(write_request(sent))
        assert found == sent, seed
        assert (found.caller, found.trace) == (sent.caller, sent.trace), seed
        assert [type(each) for each in found.parameters.values()] == [
            type(each) for each in sent.parameters.values()
        ], seed
        assert write_request(found) == write_request(sent), seed


@pytest.mark.parametrize("datatype", Datatype)
def test_a_response_is_read_as_it_was_written(datatype: Datatype) -> None:
    for seed in SEEDS:
        sent = Dice(seed).response(datatype)
        found = read_response(write_response(sent))
        assert parts(found.error) == parts(sent.error), seed
        assert write_response(found) == write_response(sent), seed
        for name in ("outputs", "parameters", "final", "usage", "phases"):
            assert getattr(found, name) == getattr(sent, name), (seed, name)
