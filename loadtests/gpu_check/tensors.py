"""A small network by three backends: its outputs against the CPU, its rate against the runtime.

Each runtime is imported by its own part, because any of them may be missing.
"""

import asyncio
import ctypes
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from gateway.errors import InferenceError
from gateway.in_process.server import Server
from loadtests.gpu_check.check import Row, Skipped
from loadtests.gpu_check.parts import CPU, CUDA, Asked
from loadtests.support.results import Better
from loadtests.support.servers import LoadTestFailed

Array = npt.NDArray[np.float32]
Network = Callable[[Array], Array]

SIZE = 256
MIB = 1 << 20
CLIENTS = 32
BYTES = CLIENTS * SIZE * 4
LARGEST_ERROR = 1e-3
"""Relative to the largest output; a GPU adds in another order."""
CONFIG = """
backend: "{backend}"
max_batch_size: {clients}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {size} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {size} ] }} ]
instance_group [ {{ kind: {kind} count: 1 }} ]
dynamic_batching {{ }}
"""


def inputs(rows: int) -> Array:
    """The same inputs at every call."""
    return np.random.default_rng(7).standard_normal((rows, SIZE), dtype=np.float32)


def weights() -> tuple[Array, Array]:
    """Of two layers with a ReLU between them."""
    random = np.random.default_rng(3)
    first, second = random.standard_normal((2, SIZE, SIZE), dtype=np.float32) / np.float32(
        SIZE**0.5
    )
    return first, second


def compare(
    backend: str, write: Callable[[Path], Any], on_cpu: Network, alone: Network, asked: Asked
) -> Sequence[Row]:
    """Serve the network that `write` stores in a version's folder, inside this process.

    `on_cpu` has the expected outputs, `alone` runs the network as the gateway does.
    """
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "network" / "1"
        version.mkdir(parents=True)
        write(version)
        config = CONFIG.format(backend=backend, clients=CLIENTS, size=SIZE, kind=asked.kind)
        (version.parent / "config.pbtxt").write_text(config)
        try:
            return uvloop.run(_compare(Path(folder), on_cpu, alone, asked))
        except InferenceError as error:
            raise LoadTestFailed(f"backend {backend}: {error}") from None


async def _compare(
    repository: Path, on_cpu: Network, alone: Network, asked: Asked
) -> Sequence[Row]:
    async with Server(model_repository=str(repository)) as server:
        model = server.model("network")

        async def served(x: Array) -> Array:
            response = await model.async_infer(inputs={"x": x}).only()
            found: Array = response.outputs["y"]
            return found

        x = inputs(CLIENTS)
        error = _error(await served(x), on_cpu(x))
        rate = _rate_alone(alone, asked.secs)
        one, many = [await _rate(served, clients, asked.secs) for clients in (1, CLIENTS)]
    return [
        Row(
            name="largest error against the CPU",
            gateway=error,
            ok=error <= LARGEST_ERROR,
            expected=f"at most {LARGEST_ERROR:g}",
        ),
        Row(name="infer/s, 1 client", gateway=one, alone=rate, better=Better.HIGHER),
        Row(name=f"infer/s, {CLIENTS} clients, batched", gateway=many, better=Better.HIGHER),
    ]


def _error(found: Array, right: Array) -> float:
    return float(np.abs(found - right).max() / np.abs(right).max())


def _rate_alone(network: Network, secs: float) -> float:
    x, count = inputs(1), 0
    network(x)
    began = time.perf_counter()
    while time.perf_counter() - began < secs:
        network(x)
        count += 1
    return count / (time.perf_counter() - began)


async def _rate(served: Callable[[Array], Any], clients: int, secs: float) -> float:
    x = inputs(1)
    await served(x)
    began = time.perf_counter()

    async def client() -> int:
        count = 0
        while time.perf_counter() - began < secs:
            await served(x)
            count += 1
        return count

    counts = await asyncio.gather(*(client() for _ in range(clients)))
    return sum(counts) / (time.perf_counter() - began)


def check_pytorch(asked: Asked) -> Sequence[Row]:
    """The backend `pytorch` against Torch on the CPU and alone, by TorchScript."""
    import torch

    if asked.device == CUDA and not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no GPU: a build for the CPU?")

    def write(folder: Path) -> None:
        network, x = _two_layers(torch), torch.zeros(1, len(weights()[0]))
        torch.jit.trace(network, x).save(str(folder / "model.pt"))

    on_cpu, alone = (_torch_network(torch, device) for device in (CPU, asked.device))
    rows = list(compare("pytorch", write, on_cpu, alone, asked))
    if asked.device == CUDA:
        rows.append(_torch_memory(torch))
    return rows


def _two_layers(torch: Any) -> Any:
    """The network, with weights as parameters."""

    class TwoLayers(torch.nn.Module):  # type: ignore[misc]  # Torch has no types here
        def __init__(self) -> None:
            super().__init__()
            first, second = (torch.nn.Parameter(torch.from_numpy(each)) for each in weights())
            self.first, self.second = first, second

        def forward(self, x: Any) -> Any:
            return torch.relu(x @ self.first) @ self.second

    return TwoLayers()


def _torch_network(torch: Any, device: str) -> Network:
    network = _two_layers(torch).to(device)

    def run(x: Array) -> Array:
        with torch.inference_mode():
            found: Array = network(torch.from_numpy(x).to(device)).cpu().numpy()
        return found

    return run


def _torch_memory(torch: Any) -> Row:
    """The proof that the gateway's copy of the weights was on the GPU: there were two."""
    found = torch.cuda.max_memory_allocated() / MIB
    two_copies = 2 * sum(each.nbytes for each in weights()) / MIB
    return Row(
        name="GPU memory that Torch took, MiB",
        gateway=found,
        ok=found >= two_copies,
        expected=f"at least {two_copies:g}",
    )


PROVIDERS = {CUDA: "CUDAExecutionProvider", CPU: "CPUExecutionProvider"}
OPSET, IR_VERSION = 17, 8


def check_onnxruntime(asked: Asked) -> Sequence[Row]:
    """The backend `onnxruntime` against ONNX Runtime on the CPU and alone, by an ONNX file."""
    import onnxruntime

    provider = PROVIDERS[asked.device]
    if provider not in (found := onnxruntime.get_available_providers()):
        raise Skipped(
            f"onnxruntime {onnxruntime.__version__} has no {provider} (it has {', '.join(found)}): "
            "onnxruntime-gpu has it"
        )
    model = _onnx_model()
    on_cpu, alone = (_onnx_network(model, PROVIDERS[device]) for device in (CPU, asked.device))
    return compare("onnxruntime", write_onnx, on_cpu, alone, asked)


def write_onnx(folder: Path) -> None:
    """Write the network into a version's folder."""
    import onnx

    onnx.save(_onnx_model(), folder / "model.onnx")


def _onnx_model() -> Any:
    from onnx import TensorProto, helper, numpy_helper

    names = ("first", "second")
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["positive"]),
        helper.make_node("MatMul", ["positive", "second"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", SIZE]) for name in "xy"
    )
    initializers = [numpy_helper.from_array(*each) for each in zip(weights(), names, strict=True)]
    graph = helper.make_graph(nodes, "network", [x], [y], initializer=initializers)
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)


def _onnx_network(model: Any, provider: str) -> Network:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[provider])
    if provider not in session.get_providers():
        raise Skipped(f"onnxruntime has {provider}, but it does not start (see the part's log)")

    def run(x: Array) -> Array:
        found: Array = session.run(["y"], {"x": x})[0]
        return found

    return run


def check_tensorrt(asked: Asked) -> Sequence[Row]:
    """The backend `tensorrt` against NumPy and the same plan alone.

    The plan is built here, because a plan is for one GPU and one version.
    """
    plan = _plan()

    def write(folder: Path) -> None:
        (folder / "model.plan").write_bytes(plan)

    return compare("tensorrt", write, _by_numpy, _Plan(plan).run, asked)


def _by_numpy(x: Array) -> Array:
    first, second = weights()
    found: Array = np.maximum(x @ first, 0) @ second
    return found


def _plan() -> bytes:
    import tensorrt

    builder = tensorrt.Builder(tensorrt.Logger(tensorrt.Logger.WARNING))
    network = builder.create_network()
    x = network.add_input("x", tensorrt.DataType.FLOAT, (-1, SIZE))
    kept = weights()  # the network only refers to them
    first, second = (network.add_constant(each.shape, each).get_output(0) for each in kept)
    hidden = network.add_activation(_product(network, x, first), tensorrt.ActivationType.RELU)
    y = _product(network, hidden.get_output(0), second)
    y.name = "y"
    network.mark_output(y)
    config = builder.create_builder_config()
    config.clear_flag(tensorrt.BuilderFlag.TF32)  # it rounds more than the CPU
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, SIZE), (CLIENTS, SIZE), (CLIENTS, SIZE))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise LoadTestFailed("TensorRT could not build the network (see the part's log)")
    return bytes(plan)


def _product(network: Any, left: Any, right: Any) -> Any:
    import tensorrt

    as_it_is = tensorrt.MatrixOperation.NONE
    return network.add_matrix_multiply(left, as_it_is, right, as_it_is).get_output(0)


class _Plan:
    """The plan, called with arrays of the host."""

    def __init__(self, plan: bytes) -> None:
        import tensorrt
        from cuda.bindings import runtime as cuda

        self._cuda = cuda
        _called(cuda.cudaSetDevice(0))
        self._logger = tensorrt.Logger(tensorrt.Logger.WARNING)
        self._engine = tensorrt.Runtime(self._logger).deserialize_cuda_engine(plan)
        self._context = self._engine.create_execution_context()
        self._stream = _called(cuda.cudaStreamCreateWithPriority(cuda.cudaStreamNonBlocking, 0))
        self._x, self._y = (_called(cuda.cudaMallocAsync(BYTES, self._stream)) for _ in "xy")
        self._given, self._made = _pinned(cuda), _pinned(cuda)
        self._context.set_tensor_address("x", int(self._x))
        self._context.set_tensor_address("y", int(self._y))

    def run(self, x: Array) -> Array:
        rows, kinds = len(x), self._cuda.cudaMemcpyKind
        given, made = self._given[:rows], self._made[:rows]
        given[:] = x
        self._copy(self._x, given.ctypes.data, x.nbytes, kinds.cudaMemcpyHostToDevice)
        self._context.set_input_shape("x", x.shape)
        if not self._context.execute_async_v3(int(self._stream)):
            raise LoadTestFailed("TensorRT does not execute the plan (see the part's log)")
        self._copy(made.ctypes.data, self._y, x.nbytes, kinds.cudaMemcpyDeviceToHost)
        _called(self._cuda.cudaStreamSynchronize(self._stream))
        return made.copy()

    def _copy(self, there: int, here: int, size: int, kind: Any) -> None:
        _called(self._cuda.cudaMemcpyAsync(there, here, size, kind, self._stream))


def _pinned(cuda: Any) -> Array:
    """Page-locked memory of the host, as the gateway's."""
    address = int(_called(cuda.cudaHostAlloc(BYTES, cuda.cudaHostAllocDefault)))
    memory = (ctypes.c_float * (CLIENTS * SIZE)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(CLIENTS, SIZE)


def _called(answer: Sequence[Any]) -> Any:
    """The result of a call of CUDA, whose status comes first; LoadTestFailed unless it is 0."""
    status, *found = answer
    if int(status):
        raise LoadTestFailed(f"CUDA: {status!r}")
    return found[0] if found else None
