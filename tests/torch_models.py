"""Tiny PyTorch models in each of the forms that are served, and the files that hold them."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from tests import needs

COMPILE_SECS = 240.0
COMPILES = pytest.mark.timeout(COMPILE_SECS + 60)
"""For tests that may be the first to need a compiled package, on a machine that is busy."""


class AddSub(torch.nn.Module):
    """The sum and the difference."""

    def forward(
        self, INPUT0: torch.Tensor, INPUT1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return INPUT0 + INPUT1, INPUT0 - INPUT1


class Linear(torch.nn.Module):
    """A weight, so that there is something to share and to own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Weight(Linear):
    """Gives its own memory away."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.weight


class Echo(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Overwriting(torch.nn.Module):
    """Changes its input in place, through a view."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.view(-1).add_(1) + y.sum()


class Counter(torch.nn.Module):
    """Adds how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(1))
        self.runs: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x + self.runs


class Raising(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            raise RuntimeError("the input is positive")
        return x


class Keyed(torch.nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": tensors["a"] + tensors["b"], "difference": tensors["a"] - tensors["b"]}


class Listed(torch.nn.Module):
    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[0] - tensors[1], tensors[0]]


class Shouting(torch.nn.Module):
    def forward(self, texts: list[str]) -> list[str]:
        return [text.upper() for text in texts]


class Choosy(torch.nn.Module):
    """An optional argument, and one with a default."""

    def forward(
        self,
        x: torch.Tensor,
        shift: torch.Tensor | None = None,
        factor: int = 2,
    ) -> torch.Tensor:
        return x * factor if shift is None else x * factor + shift


class Counting(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n


class Scalar(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class Busy(torch.nn.Module):
    """Work enough that PyTorch divides it among threads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = torch.mm(x, x).clamp(-1.0, 1.0)
        return x


def script(module: torch.nn.Module, path: Path) -> Path:
    """Save as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(module).save(str(path))
    return path


def trace(module: torch.nn.Module, path: Path, *examples: torch.Tensor) -> Path:
    """Save as TorchScript that was traced with examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(module, examples).save(str(path))
    return path


def export(module: torch.nn.Module, path: Path, *args: Any, **options: Any) -> Path:
    """Save as a program of torch.export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, args, **options), path)
    return path


def export_add_sub(path: Path, most: int = 64) -> Path:
    """AddSub of 16 numbers, in batches of at most `most`."""
    batch = torch.export.Dim("batch", min=1, max=most)
    shapes = {"INPUT0": {0: batch}, "INPUT1": {0: batch}}
    return export(AddSub(), path, torch.zeros(2, 16), torch.zeros(2, 16), dynamic_shapes=shapes)


def compile_package(exported: Path, path: Path) -> Path:
    """Compile a program of torch.export with AOTInductor, in a process that then ends."""
    needs.inductor()
    work = (
        "import sys, torch\n"
        "program = torch.export.load(sys.argv[1])\n"
        # The C++ around the kernels takes a minute to optimize, for one call of a test.
        "configs = {'aot_inductor.compile_wrapper_opt_level': 'O0'}\n"
        "torch._inductor.aoti_compile_and_package(\n"
        "    program, package_path=sys.argv[2], inductor_configs=configs\n"
        ")\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", work, str(exported), str(path)],
        capture_output=True,
        text=True,
        timeout=COMPILE_SECS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return path


def config_of(
    file: str,
    inputs: dict[str, DataType],
    outputs: dict[str, DataType],
    dims: tuple[int, ...] = (-1, -1),
    **fields: Any,
) -> ModelConfig:
    """A config whose tensors all have the same dims."""
    return ModelConfig(
        **{"name": "m", "backend": "pytorch", "default_model_filename": file, **fields},
        input=tuple(ModelInput(name=n, data_type=t, dims=dims) for n, t in inputs.items()),
        output=tuple(ModelOutput(name=n, data_type=t, dims=dims) for n, t in outputs.items()),
    )
