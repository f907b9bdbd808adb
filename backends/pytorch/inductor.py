"""Packages of AOTInductor, and the inputs that their source accepts.

Compiled code does not check the shapes of its inputs: a tensor that is too small makes it read
foreign memory. Its own checks are enabled by an environment variable only, and refuse batches of
one. So the expected shapes are read from the C++ source in the package, and checked here.
"""

import logging
import re
import zipfile
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.utils._pytree as pytree
from torch._C._aoti import AOTIModelPackageLoader

from backends.pytorch.signature import (
    Program,
    ProgramSignature,
    Size,
    TensorSlot,
    Value,
    input_slots,
    output_slots,
)
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype

log = logging.getLogger("sluice.pytorch")

LOADER: Any = AOTIModelPackageLoader
"""Its type hints are incomplete."""

MODEL = "model"
"""The name under which `aoti_compile_and_package` packs a model."""

_CPU_FLAGS = {
    "AVX2": "avx2",
    "AVX512": "avx512f",
    "AVX512_VNNI": "avx512_vnni",
    "AMX_TILE": "amx_tile",
}
"""The compiler's names of instruction sets, and the system's."""

_CHECK = re.compile(r"static void check_input_(\d+)\(.*?\n}\n", re.DOTALL)
_HANDLE = re.compile(r"ConstantHandle (\w+) = ConstantHandle\(input_handles\[(\d+)\]\)")
_TYPE = re.compile(r"= aoti_torch_dtype_(\w+)\(\)")
_EXACT = re.compile(r"if \((\d+) != \w+_size\[(\d+)\]\)")
_MOST = re.compile(r"if \(\w+_size\[(\d+)\] > (\d+)\)")
_SHAPE = r'assert_size_stride\({name}, \{{([^}}]*)\}}, \{{[^}}]*\}}, "input"\)'
_READS = (
    r"(?:auto {name} = std::move\(inputs\[\d+\]\)|auto {name}_size = {name}\.sizes\(\)|"
    r"\(const [\w:]+ ?\*\)\({name}\.data_ptr\(\)\)|{name}\.reset\(\)|"
    r"= {name}\.release\(\)|assert_size_stride\({name},)"
)
_TYPES = {
    "bool": Datatype.BOOL,
    "float16": Datatype.FP16,
    "float32": Datatype.FP32,
    "float64": Datatype.FP64,
    "bfloat16": Datatype.BF16,
    **{f"{sign}int{bits}": Datatype(f"{sign}int{bits}".upper())
       for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip


class InductorProgram(Program):
    """A package of AOTInductor, loaded for one device."""

    def __init__(self, loader: Any, source: str) -> None:
        self._run = loader.boxed_run
        in_spec, out_spec = (pytree.treespec_loads(text) for text in loader.get_call_spec())
        inputs = enumerate(input_slots(in_spec))
        self.signature = ProgramSignature(
            tuple(expected(slot, place, source) for place, slot in inputs), output_slots(out_spec)
        )

    def run(self, values: Sequence[Value | None]) -> Sequence[Any]:
        found: Sequence[Any] = self._run(list(values))
        return found


def load_inductor(path: Path, device: str | None, runners: int) -> InductorProgram:
    """Load the package; InferenceError if it was compiled for another kind of device.

    `runners` is the number of threads that may run it concurrently.
    """
    kind, _, number = (device or "").partition(":")
    facts = LOADER.load_metadata_from_package(str(path), MODEL)
    compiled = facts.get("AOTI_DEVICE_KEY", kind)
    if kind and compiled != kind:
        raise InferenceError(
            Code.INVALID_ARG,
            f"the package is compiled for {compiled}, the instance group asks for {kind}",
        )
    if missing := lacking(facts.get("AOTI_CPU_ISA", ""), _cpu_flags()):
        raise InferenceError(
            Code.INVALID_ARG,
            f"the package is compiled for a CPU with {', '.join(missing)}, which this one lacks; "
            "compile it on a machine like this one",
        )
    if any(map(can_abort, _sources(path, ".kernel.cpp"))):
        log.warning(
            "an index out of bounds in a request would end the server: its check is in a parallel "
            "loop; compile the package with inductor_configs={'cpp.threads': 1} to have it caught",
            extra={"file": path.name},
        )
    loader = LOADER(str(path), MODEL, False, runners, int(number or -1))
    return InductorProgram(loader, _source(path))


def lacking(isa: str, flags: Set[str]) -> list[str]:
    """Instruction sets that compiled code needs and the CPU lacks; using them kills the process.

    `flags` are the system's; if they are empty, nothing is known to be missing.
    """
    needed = [_CPU_FLAGS[name] for name in isa.split() if name in _CPU_FLAGS]
    return [flag for flag in needed if flag not in flags] if flags else []


def can_abort(kernel: str) -> bool:
    """Whether the source of a kernel has a check in a parallel loop, where exceptions abort."""
    return "#pragma omp parallel" in kernel and "TORCH_CHECK(" in kernel


def _sources(path: Path, ending: str) -> Iterator[str]:
    with zipfile.ZipFile(path) as package:
        for name in package.namelist():
            if name.endswith(ending):
                yield package.read(name).decode(errors="replace")


def _cpu_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    match = re.search(r"^flags\s*: (.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _source(path: Path) -> str:
    """The C++ source that calls the compiled kernels, "" if the package has none."""
    with zipfile.ZipFile(path) as package:
        for name in package.namelist():
            if name.endswith(".wrapper.cpp") or (name.endswith(".cpp") and "kernel" not in name):
                return package.read(name).decode(errors="replace")
    log.warning("package without source: shapes of inputs are not checked")
    return ""


def expected(slot: TensorSlot, place: int, source: str) -> TensorSlot:
    """The slot with datatype and shape of the input in that place of the source.

    An input counts as written unless all mentions of it only read.
    """
    check = next((m[0] for m in _CHECK.finditer(source) if int(m[1]) == place), "")
    handle = _HANDLE.search(check)
    if handle is None:
        return replace(slot, written=True)
    name, body = handle[1], source[source.find("AOTInductorModel::run_impl(") :]
    reads = re.findall(_READS.format(name=name), body)
    return replace(
        slot,
        datatype=_datatype(check),
        shape=_shape(check, re.search(_SHAPE.format(name=name), body)),
        limits=tuple((int(m[1]), int(m[2])) for m in _MOST.finditer(check)),
        written=_mentions("".join(reads), name) != _mentions(body, name),
    )


def _mentions(text: str, name: str) -> int:
    return len(re.findall(rf"\b{name}\b(?!_)", text))


def _datatype(check: str) -> Datatype | None:
    match = _TYPE.search(check)
    return _TYPES.get(match[1]) if match else None


def _shape(check: str, asserted: "re.Match[str] | None") -> tuple[Size, ...] | None:
    """The sizes in order: from the assertion on the whole shape, else from checks of each."""
    if asserted is not None:
        return tuple(_sizes(asserted[1]))
    exact = {int(m[2]): int(m[1]) for m in _EXACT.finditer(check)}
    places = {*exact, *(int(m[1]) for m in _MOST.finditer(check))}
    return tuple(exact.get(place, -1) for place in range(max(places) + 1)) if places else None


def _sizes(text: str) -> Iterator[Size]:
    for size in filter(None, (each.strip() for each in text.split(","))):
        if match := re.fullmatch(r"(\d+)L*", size):
            yield int(match[1])
        else:
            yield size if size.isidentifier() else -1
