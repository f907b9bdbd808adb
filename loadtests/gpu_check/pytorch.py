"""The backend `pytorch` on the device, against Torch on the CPU and against Torch alone."""

from collections.abc import Sequence
from pathlib import Path

import torch

from loadtests.gpu_check.outcome import Row, Skipped
from loadtests.gpu_check.parts import CUDA, Asked
from loadtests.gpu_check.tensor_model import Array, Network, compare, weights

MIB = 1 << 20


class TwoLayers(torch.nn.Module):
    """The network, with weights as parameters."""

    def __init__(self, first: Array, second: Array) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.from_numpy(first))
        self.second = torch.nn.Parameter(torch.from_numpy(second))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.first) @ self.second


def check(asked: Asked) -> Sequence[Row]:
    """TorchScript, because every Torch can write and read it."""
    if asked.device == CUDA and not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no GPU: a build for the CPU?")

    def write(folder: Path) -> None:
        network = TwoLayers(*weights())
        torch.jit.trace(network, torch.zeros(1, len(weights()[0]))).save(str(folder / "model.pt"))

    rows = list(compare("pytorch", write, _network("cpu"), _network(asked.device), asked))
    if asked.device == CUDA:
        rows.append(_memory())
    return rows


def _network(device: str) -> Network:
    network = TwoLayers(*weights()).to(device)

    def run(x: Array) -> Array:
        with torch.inference_mode():
            found: Array = network(torch.from_numpy(x).to(device)).cpu().numpy()
        return found

    return run


def _memory() -> Row:
    """Shows that the gateway's copy was on the GPU: two copies of the weights, not one."""
    found = torch.cuda.max_memory_allocated() / MIB
    two_copies = 2 * sum(each.nbytes for each in weights()) / MIB
    return Row(
        name="GPU memory that Torch took, MiB",
        gateway=found,
        ok=found >= two_copies,
        expected=f"at least {two_copies:g}",
    )
