"""One instance of a PyTorch model."""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from backends.pytorch.model_file import FAILURES, reason
from backends.pytorch.parameters import PytorchParameters, ThreadBudget
from backends.pytorch.signature import (
    Program,
    SignatureFit,
    Value,
    check_place,
    place_inputs,
    place_outputs,
)
from backends.pytorch.tensors import from_torch, to_torch
from gateway.batches.stacking import with_sequence_tensors
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor import Tensor
from gateway.tensor_runtime.instance import TensorInstance


class PytorchInstance(TensorInstance):
    """Runs a program on one device; PyTorch releases the interpreter's lock inside operations.

    On a GPU each instance has a stream of its own, so that instances compute concurrently.

    `threads` counts it while it is open, if it computes on the CPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        program: Program,
        device: torch.device,
        threads: ThreadBudget,
    ) -> None:
        self._inputs = place_inputs(config, program.signature.inputs)
        self._outputs = place_outputs(config, program.signature.outputs)
        self._parameters = PytorchParameters.read(config)
        super().__init__(config, name)  # starts a thread: refusals must come before it
        self._model = config.name
        self._program = program
        self._fit = SignatureFit(program.signature.inputs)
        self._device = device
        self._stream = _own_stream(device)
        self.gpu = device.index if device.type == "cuda" else None
        known = with_sequence_tensors(config)
        self._datatypes = {each.name: each.datatype for each in known.output}
        self._threads = threads
        if device.type == "cpu":
            threads.join()

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[str], staying: Set[str]
    ) -> Mapping[str, Tensor]:
        with self._share(), self._without_gradients():
            results = self._results(self._values(inputs))
            for name in outputs:
                check_place(name, self._outputs[name], len(results))
            found = {name: self._output(name, results, stays=name in staying) for name in outputs}
            if staying:
                self._wait()
        if self._parameters.enable_cache_cleaning and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def release(self) -> None:
        """Leave the budget of threads; the last instance releases the program."""
        del self._program
        if self._device.type == "cpu":
            self._threads.leave()
        else:
            torch.cuda.empty_cache()

    def _share(self) -> AbstractContextManager[object]:
        """The threads of a run, or its stream on a GPU."""
        if self._stream is not None:
            stream: AbstractContextManager[object] = torch.cuda.stream(self._stream)
            return stream
        return self._threads.taken() if self._device.type == "cpu" else nullcontext()

    def _without_gradients(self) -> AbstractContextManager[object]:
        mode = torch.inference_mode if self._parameters.inference_mode else torch.no_grad
        found: AbstractContextManager[object] = mode()
        return found

    def _values(self, inputs: Mapping[str, Tensor]) -> list[Value | None]:
        slots = self._program.signature.inputs
        values: list[Value | None] = [None] * len(slots)
        for name, place in self._inputs.items():
            if name in inputs:
                values[place] = to_torch(inputs[name], slots[place], self._device)
            elif not slots[place].optional:
                raise InferenceError(
                    Code.INVALID_ARG,
                    f"input '{name}' of model '{self._model}' is missing, forward() needs it",
                )
        self._fit.check(values)
        return values

    def _results(self, values: Sequence[Value | None]) -> Sequence[Any]:
        with self._explained():
            if not self._parameters.disable_optimized_execution:
                return self._program.run(values)
            with torch.jit.optimized_execution(False):
                return self._program.run(values)

    def _wait(self) -> None:
        """Wait until the staying outputs have been computed."""
        if self._stream is not None:
            with self._explained():
                self._stream.synchronize()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            raise InferenceError(
                Code.INTERNAL, f"model '{self._model}': PyTorch execute failure: {reason(error)}"
            ) from error

    def _output(self, name: str, results: Sequence[Any], *, stays: bool) -> Tensor:
        value = results[self._outputs[name]]
        owned = isinstance(value, torch.Tensor) and self._program.owns(value)
        return from_torch(name, self._datatypes[name], value, copied=owned, stays=stays)


def _own_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)  # the weights were copied by another stream
    return torch.cuda.Stream(device)
