"""One session of ONNX Runtime that serves requests."""

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.onnxruntime.library import onnxruntime
from backends.onnxruntime.model_file import BFLOAT16, BFLOAT16_KIND, signature
from backends.onnxruntime.parameters import CorePin
from backends.onnxruntime.session import clear_failures
from gateway.backend import ModelContext
from gateway.batches.stacking import with_sequence_tensors
from gateway.config import InstanceKind
from gateway.cuda_driver import DeviceMemory
from gateway.tensor import NUMPY_TYPES, Datatype, Tensor, array_tensor, unicode_strings
from gateway.tensor_runtime.instance import TensorInstance
from gateway.tensor_runtime.signature import ModelSignature

ALIGNED_BYTES = 256
"""The alignment of the runtime's own memory of a GPU, on which kernels may rely."""

HOST = "cpu"
STRINGS = "tensor(string)"


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """A GPU as ONNX Runtime names it."""

    device: str
    number: int


InputsOnGpu = Mapping[str, tuple[Tensor, DeviceMemory]]
"""Inputs by name, with their memory on the GPU."""

SHRINKAGE = "memory.enable_memory_arena_shrinkage"


class OnnxRuntimeInstance(TensorInstance):
    """Inputs are views of the requests, outputs are views of the runtime's memory.

    `run` does so on the CPU; binding inputs and outputs one by one takes longer and saves no copy.
    On a GPU it copies in and out, which requests from a network need anyway; tensors that are on
    the GPU, or stay there, are bound. Each session there has a stream of its own.
    A run without waiting clients is terminated between two operators. `turn` is entered for each
    run: it waits if sessions share their threads, or counts the runs.
    """

    def __init__(
        self, context: ModelContext, session: Any, turn: AbstractContextManager[Any] | None = None
    ) -> None:
        super().__init__(context.config, context.name)
        self._model = context.config.name
        self._clear_failures = clear_failures(context.path, f"model '{self._model}' failed")
        self._session = session
        self._turn = turn or nullcontext()
        self._pin: CorePin | None = None
        self._shrinkage = context.config.parameter(SHRINKAGE)
        known = with_sequence_tensors(context.config)
        self._datatypes = {output.name: output.datatype for output in known.output}
        found = signature(session)
        self._bfloat16 = _names_of_bfloat16(found)
        self._options = self._run_options()
        self.place = gpu_place(context, found)
        self.gpu = self.place.number if self.place else None

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[str], staying: Set[str]
    ) -> Mapping[str, Tensor]:
        there: InputsOnGpu = {}
        if self.gpu is not None:
            there = inputs_on_gpu(self.gpu, inputs.values())
        feeds: dict[str, npt.NDArray[Any]] = {}
        for name, each in inputs.items():
            if name in there:
                continue
            if each.datatype is Datatype.BYTES:
                feeds[name] = unicode_strings(each, self._model, "ONNX models")
                continue
            array = each.array()
            # Tensors of one body start at any offset; kernels may need alignment.
            feeds[name] = array if array.flags.aligned else array.copy()
        if self.place and (there or staying):
            return self._run_bound(self.place, there, feeds, outputs, staying)
        options = self._options
        compute = self._run_values if self._bfloat16 else self._session.run
        with self._turn, self._clear_failures:
            arrays = compute(list(outputs), feeds, options)
        found: dict[str, Tensor] = {}
        for name, array in zip(outputs, arrays, strict=True):  # faster than a comprehension in 3.11
            found[name] = array_tensor(name, self._datatypes[name], array)
        return found

    def _run_bound(
        self,
        place: GpuPlace,
        there: InputsOnGpu,
        feeds: Mapping[str, npt.NDArray[Any]],
        outputs: Sequence[str],
        staying: Set[str],
    ) -> dict[str, Tensor]:
        """Run with inputs that are on the GPU, and outputs that stay there."""
        values = {name: self._value(name, array) for name, array in feeds.items()}
        with self._turn, self._clear_failures:
            binding = bind(self._session, place, values, there)
            bind_outputs(binding, place, outputs, staying)
            self._session.run_with_iobinding(binding, self._options)
            found = dict(zip(outputs, binding.get_outputs(), strict=True))
        return {
            name: self._staying(name, value, place) if name in staying else self._host(name, value)
            for name, value in found.items()
        }

    def _staying(self, name: str, value: Any, place: GpuPlace) -> Tensor:
        size = value.tensor_size_in_bytes()
        memory = DeviceMemory(place.number, value.data_ptr(), size, value)
        return Tensor(name, self._datatypes[name], tuple(value.shape()), memory)

    def _host(self, name: str, value: Any) -> Tensor:
        return array_tensor(name, self._datatypes[name], _view(value))

    def abort(self) -> None:
        # Later runs have new options, which are not terminated.
        options, self._options = self._options, self._run_options()
        options.terminate = True

    async def keep_to(self, pin: CorePin) -> None:
        """Bind the thread of the runs to these cores."""
        self._pin = pin
        await self._thread.call(pin.keep)

    def release(self) -> None:
        del self._session
        if self._pin is not None:
            self._pin.end()

    def _run_options(self) -> Any:
        options = onnxruntime.RunOptions()
        if self._shrinkage:
            options.add_run_config_entry(SHRINKAGE, self._shrinkage)
        return options

    # bfloat16, which numpy lacks: its bits travel as uint16.

    def _run_values(
        self, names: list[str], feeds: Mapping[str, npt.NDArray[Any]], options: Any
    ) -> list[npt.NDArray[Any]]:
        values = {name: self._value(name, array) for name, array in feeds.items()}
        return [_view(value) for value in self._session.run_with_ort_values(names, values, options)]

    def _value(self, name: str, array: npt.NDArray[Any]) -> Any:
        if name in self._bfloat16:
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16)
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _names_of_bfloat16(found: ModelSignature) -> frozenset[str]:
    known = {**found.inputs, **found.defaults, **found.outputs}
    return frozenset(name for name, each in known.items() if each.kind == BFLOAT16_KIND)


def _view(value: Any) -> npt.NDArray[Any]:
    return np.asarray(_Bits(value)) if value.data_type() == BFLOAT16_KIND else value.numpy()


class _Bits:
    """The memory of a value as an array of uint16, which keeps the value alive."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.__array_interface__ = {
            "data": (value.data_ptr(), True),
            "typestr": "<u2",
            "shape": tuple(value.shape()),
            "version": 3,
        }


def gpu_place(context: ModelContext, found: ModelSignature) -> GpuPlace | None:
    """The device of an instance; None on the host, and for strings, which cannot be bound."""
    every = (*found.inputs.values(), *found.defaults.values())
    if context.group.kind is not InstanceKind.KIND_GPU or any(
        each.kind == STRINGS for each in (*every, *found.outputs.values())
    ):
        return None
    return GpuPlace("cuda", context.device)


def inputs_on_gpu(gpu: int, inputs: Iterable[Tensor]) -> InputsOnGpu:
    """The inputs that a run on that GPU can use in place.

    BOOL is not among them: it must be normalised to ones and zeros on the host.
    """
    return {
        tensor.name: (tensor, data)
        for tensor in inputs
        if isinstance(data := tensor.data, DeviceMemory)
        and data.gpu == gpu
        and data.address % ALIGNED_BYTES == 0
        and tensor.datatype is not Datatype.BOOL
    }


def bind(session: Any, place: GpuPlace, values: Mapping[str, Any], there: InputsOnGpu) -> Any:
    """A binding with inputs of the host, and inputs on the GPU."""
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, (tensor, memory) in there.items():
        element = NUMPY_TYPES.get(tensor.datatype, BFLOAT16)
        where = (place.device, place.number)
        binding.bind_input(name, *where, element, tensor.shape, memory.address)
    return binding


def bind_outputs(binding: Any, place: GpuPlace, names: Sequence[str], staying: Set[str]) -> None:
    """Bind outputs that the runtime allocates: staying ones on the GPU, others on the host."""
    for name in names:
        where = (place.device, place.number) if name in staying else (HOST, 0)
        binding.bind_output(name, *where)
