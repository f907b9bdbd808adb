"""The backend `identity`: inputs as outputs, with delays, failures and gates, for tests."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway.backend import Answer, Backend, Instance, ModelContext
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS, InferRequest, InferResponse
from gateway.tensor import Tensor

HOLD_POLL_SECS = 0.01


class ExecutionGate:
    """Holds executions until a test opens it; counts waiting and cancelled ones."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._changed = asyncio.Condition()
        self.waiting = 0
        self.cut = 0

    def open(self) -> None:
        """Release all executions, present and later."""
        self._opened.set()

    async def passed(self) -> None:
        """Wait until the gate is open."""
        await self._count(waiting=1)
        try:
            await self._opened.wait()
        except asyncio.CancelledError:
            self.cut += 1
            raise
        finally:
            self.waiting -= 1

    async def reached(self, count: int) -> None:
        """Wait until this many executions are held."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.waiting >= count)

    async def _count(self, waiting: int) -> None:
        async with self._changed:
            self.waiting += waiting
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Settings of an instance, from `parameters` of its config.

    `delay_us`: wait before each answer. `hold_file`: wait before each answer while the version
    folder has this file. `fail`: fail with this text. `responses`: number of equal
    responses to a request. `concurrency`: concurrent executions, 0 for no limit. `load_fails`:
    fail to load with this text.
    """

    delay_us: int = 0
    hold_file: str = ""
    fail: str = ""
    responses: int = 1
    concurrency: int = 1
    load_fails: str = ""
    gate: ExecutionGate | None = field(default=None, compare=False)

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> "Behaviour":
        """Behaviour from a config's parameters; InferenceError for a value that is no number."""
        return cls(
            delay_us=_number(parameters, "delay_us", 0),
            hold_file=parameters.get("hold_file", ""),
            fail=parameters.get("fail", ""),
            responses=_number(parameters, "responses", 1),
            concurrency=_number(parameters, "concurrency", 1),
            load_fails=parameters.get("load_fails", ""),
        )


def _number(parameters: Mapping[str, str], key: str, default: int) -> int:
    text = parameters.get(key, str(default))
    if not text.isdecimal():
        raise InferenceError(
            Code.INVALID_ARG, f"parameter '{key}' is '{text}', expected a number of at least 0"
        )
    return int(text)


class IdentityInstance(Instance):
    """Returns each input as the output that `outputs` has for its name, or else under its name.

    Outputs are in the order of `outputs`; an input that it does not name is not returned.
    """

    def __init__(
        self,
        behaviour: Behaviour,
        outputs: Mapping[str, str] = NO_PARAMETERS,
        path: Path | None = None,
    ) -> None:
        self.concurrency = behaviour.concurrency or None
        self._behaviour = behaviour
        self._outputs = outputs
        self._hold = path / behaviour.hold_file if path and behaviour.hold_file else None

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        if self._behaviour.gate is not None:
            await self._behaviour.gate.passed()
        for index, request in enumerate(requests):
            for number in range(1, self._behaviour.responses + 1):
                yield index, await self._answer(request, number)

    async def close(self) -> None:
        """Nothing to release."""

    async def _answer(self, request: InferRequest, number: int) -> InferResponse | InferenceError:
        if self._behaviour.delay_us:
            await asyncio.sleep(self._behaviour.delay_us / 1e6)
        while self._hold is not None and self._hold.exists():  # noqa: ASYNC110
            await asyncio.sleep(HOLD_POLL_SECS)
        if self._behaviour.fail:
            return InferenceError(Code.INTERNAL, self._behaviour.fail)
        return InferResponse(outputs=self._echo(request), final=number == self._behaviour.responses)

    def _echo(self, request: InferRequest) -> tuple[Tensor, ...]:
        names = self._outputs or {tensor.name: tensor.name for tensor in request.inputs}
        wanted = {output.name for output in request.outputs} or set(names.values())
        found = ((request.input(name), output) for name, output in names.items())
        return tuple(
            replace(tensor, name=output)
            for tensor, output in found
            if tensor is not None and output in wanted
        )


class IdentityBackend(Backend):
    """The backend `identity`; a gate holds every execution of its instances."""

    def __init__(self, gate: ExecutionGate | None = None) -> None:
        self._gate = gate

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        if len(config.output) > len(config.input):
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{config.name}' has {len(config.output)} outputs for "
                f"{len(config.input)} inputs: identity answers each input as one output",
            )
        return config

    async def load(self, context: ModelContext) -> Instance:
        behaviour = Behaviour.read(context.config.parameters)
        if behaviour.load_fails:
            raise InferenceError(Code.INTERNAL, behaviour.load_fails)
        config = context.config
        pairs = zip(config.input, config.output, strict=False)
        outputs = {tensor.name: output.name for tensor, output in pairs}
        return IdentityInstance(replace(behaviour, gate=self._gate), outputs, context.path)
