"""The backend `tensorrt` on the GPU, against NumPy on the CPU and the same plan alone."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt
from cuda.bindings import runtime as cuda

from loadtests.gpu_check.outcome import Row
from loadtests.gpu_check.parts import Asked
from loadtests.gpu_check.tensor_model import CLIENTS, SIZE, Array, compare, weights
from loadtests.support.rounds import LoadTestFailed

LOGGER = tensorrt.Logger(tensorrt.Logger.WARNING)
BYTES = CLIENTS * SIZE * 4


def check(asked: Asked) -> Sequence[Row]:
    """The same network as a plan, which is built here: plans are for one GPU and one version."""
    plan = _plan()

    def write_model(folder: Path) -> None:
        (folder / "model.plan").write_bytes(plan)

    return compare("tensorrt", write_model, _on_cpu, _Alone(plan).run, asked)


def _on_cpu(x: Array) -> Array:
    first, second = weights()
    found: Array = np.maximum(x @ first, 0) @ second
    return found


def _plan() -> bytes:
    builder = tensorrt.Builder(LOGGER)
    network = builder.create_network()
    x = network.add_input("x", tensorrt.DataType.FLOAT, (-1, SIZE))
    kept = weights()  # the network only refers to them
    first, second = (network.add_constant(each.shape, each).get_output(0) for each in kept)
    hidden = network.add_activation(_product(network, x, first), tensorrt.ActivationType.RELU)
    y = _product(network, hidden.get_output(0), second)
    y.name = "y"
    network.mark_output(y)
    config = builder.create_builder_config()
    config.clear_flag(tensorrt.BuilderFlag.TF32)  # it would round what the CPU does not
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, SIZE), (CLIENTS, SIZE), (CLIENTS, SIZE))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise LoadTestFailed("TensorRT could not build the network (see the part's log)")
    return bytes(plan)


def _product(network: Any, left: Any, right: Any) -> Any:
    as_it_is = tensorrt.MatrixOperation.NONE
    return network.add_matrix_multiply(left, as_it_is, right, as_it_is).get_output(0)


class _Alone:
    """The plan, called with arrays of the host."""

    def __init__(self, plan: bytes) -> None:
        _called(cuda.cudaSetDevice(0))
        self._engine = tensorrt.Runtime(LOGGER).deserialize_cuda_engine(plan)
        self._context = self._engine.create_execution_context()
        self._stream = _called(cuda.cudaStreamCreateWithPriority(cuda.cudaStreamNonBlocking, 0))
        self._x, self._y = (_called(cuda.cudaMallocAsync(BYTES, self._stream)) for _ in "xy")
        self._given, self._made = _pinned(), _pinned()
        self._context.set_tensor_address("x", int(self._x))
        self._context.set_tensor_address("y", int(self._y))

    def run(self, x: Array) -> Array:
        rows, kinds = len(x), cuda.cudaMemcpyKind
        given, made = self._given[:rows], self._made[:rows]
        given[:] = x
        self._copy(self._x, given.ctypes.data, x.nbytes, kinds.cudaMemcpyHostToDevice)
        self._context.set_input_shape("x", x.shape)
        if not self._context.execute_async_v3(int(self._stream)):
            raise LoadTestFailed("TensorRT does not execute the plan (see the part's log)")
        self._copy(made.ctypes.data, self._y, x.nbytes, kinds.cudaMemcpyDeviceToHost)
        _called(cuda.cudaStreamSynchronize(self._stream))
        return made.copy()

    def _copy(self, there: int, here: int, size: int, kind: Any) -> None:
        _called(cuda.cudaMemcpyAsync(there, here, size, kind, self._stream))


def _pinned() -> Array:
    """Memory of the host that the GPU copies from and to by itself, as the gateway's."""
    address = int(_called(cuda.cudaHostAlloc(BYTES, cuda.cudaHostAllocDefault)))
    memory = (ctypes.c_float * (CLIENTS * SIZE)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(CLIENTS, SIZE)


def _called(answer: Sequence[Any]) -> Any:
    """What a call of CUDA's gives; its status comes first."""
    status, *found = answer
    if int(status):
        raise LoadTestFailed(f"CUDA: {status!r}")
    return found[0] if found else None
