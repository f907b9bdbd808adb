"""Backends, the NVIDIA driver, GPUs, and the runtimes that can use them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.backend_loader import EXTRAS
from gateway.tools.doctor.packages import RUNTIMES, Versions
from gateway.tools.doctor.probes import Outcome
from gateway.tools.doctor.report import Finding, Health, size

DRIVER = Path("/proc/driver/nvidia/version")
GET_NVML = "pip install nvidia-ml-py"
PROVIDER = "CUDAExecutionProvider"
SCARCE = 0.1
"""Fraction of a GPU's memory: with less free, models are unlikely to load."""

Capability = tuple[int, int]

INSTALL = "install Sluice in this environment: pip install --no-deps -e ., in a checkout"


def driver(outcome: Outcome, kernel: Path = DRIVER) -> Iterator[Finding]:
    """The driver and its CUDA version, then each GPU."""
    if outcome.told.get("missing"):
        yield _without_nvml(kernel)
    elif outcome.error:
        yield _failed(outcome.error, kernel)
    else:
        yield _driver(outcome.told)
        yield from map(_gpu, range(len(gpus(outcome))), gpus(outcome))


def gpus(outcome: Outcome) -> Sequence[Mapping[str, Any]]:
    """The GPUs that NVML lists."""
    found: Sequence[Mapping[str, Any]] = outcome.told.get("gpus", ())
    return found


def torch(outcome: Outcome, found: Sequence[Mapping[str, Any]]) -> Finding:
    """Whether Torch computes on the GPUs that were `found`."""
    what, told = "Torch on CUDA", outcome.told
    if outcome.error:
        return Finding(what, outcome.error, Health.BROKEN, "see the backend pytorch")
    if not told["cuda"]:
        return _of_cpu(what, "torch", found)
    if not told["capabilities"]:
        return _unseen(what, f"a build for CUDA {told['cuda']}, which sees no GPU", found)
    lowest = min(map(_capability, told["architectures"]), default=(0, 0))
    if too_old := [each for each in told["capabilities"] if tuple(each) < lowest]:
        text = f"has no code for compute capability {_dotted(too_old[0])}"
        fix = f"it starts at {_dotted(lowest)}: install a build for older GPUs"
        return Finding(what, text, Health.CANNOT, fix)
    return Finding(what, f"CUDA {told['cuda']}, {_count(len(told['capabilities']))}")


def onnxruntime(outcome: Outcome, found: Sequence[Mapping[str, Any]]) -> Finding:
    """Whether ONNX Runtime was built for CUDA."""
    what = "ONNX Runtime on CUDA"
    if outcome.error:
        return Finding(what, outcome.error, Health.BROKEN, "see the backend onnxruntime")
    providers = [each.removesuffix("ExecutionProvider") for each in outcome.told["providers"]]
    if PROVIDER not in outcome.told["providers"]:
        return _of_cpu(what, "onnxruntime-gpu", found)
    if not found:
        return _unseen(what, "a build for CUDA, and no GPU is known", found)
    return Finding(what, f"providers: {', '.join(providers)}")


def _without_nvml(kernel: Path) -> Finding:
    if kernel.exists():
        return Finding(
            "NVIDIA driver",
            f"{_kernel_version(kernel)}; GPUs and nv_gpu_* metrics need Python's pynvml",
            Health.WARNING,
            GET_NVML,
        )
    return _no_driver()


def _failed(error: str, kernel: Path) -> Finding:
    if not kernel.exists():
        return _no_driver()
    fix = "compare with nvidia-smi; a driver that was updated wants a restart of the machine"
    return Finding("NVIDIA driver", f"NVML: {error}", Health.BROKEN, fix)


def _no_driver() -> Finding:
    fix = "for the CPU none; for GPUs install NVIDIA's driver (CUDA 13: 580 or later), start "
    fix += f"containers with --gpus all, and {GET_NVML}"
    return Finding("NVIDIA driver", "not there: GPUs are not used", Health.CANNOT, fix)


def _driver(told: Mapping[str, Any]) -> Finding:
    major, minor = divmod(told["cuda"], 1000)
    return Finding("NVIDIA driver", f"{told['driver']}, up to CUDA {major}.{minor // 10}")


def _gpu(index: int, told: Mapping[str, Any]) -> Finding:
    free = told["total"] - told["used"]
    text = f"{told['name']}, compute capability {_dotted(told['capability'])}, "
    text += f"{size(free)} of {size(told['total'])} free"
    if free < SCARCE * told["total"]:
        return Finding(
            f"GPU {index}",
            text,
            Health.WARNING,
            "nvidia-smi shows the processes that hold its memory",
        )
    return Finding(f"GPU {index}", text)


def _of_cpu(what: str, package: str, found: Sequence[Mapping[str, Any]]) -> Finding:
    if found:
        fix = f"install {package} in a build for CUDA"
        return Finding(what, "a build for the CPU", Health.CANNOT, fix)
    return Finding(what, "a build for the CPU, as this machine is")


def _unseen(what: str, text: str, found: Sequence[Mapping[str, Any]]) -> Finding:
    if found:
        fix = "update the driver to that CUDA version; look at CUDA_VISIBLE_DEVICES"
        return Finding(what, text, Health.BROKEN, fix)
    return Finding(what, text, Health.WARNING, "none for the CPU; see NVIDIA driver")


def _capability(architecture: str) -> Capability:
    """`sm_90a` and `compute_120` as numbers."""
    digits = "".join(filter(str.isdigit, architecture.partition("_")[2]))
    return int(digits[:-1] or 0), int(digits[-1:] or 0)


def _dotted(capability: Sequence[int]) -> str:
    return ".".join(map(str, capability))


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus != 1 else ''}"


def _kernel_version(kernel: Path) -> str:
    words = kernel.read_text().partition("Kernel Module")[2].split()
    return next((word for word in words if word[0].isdigit()), "there")


def backends(outcomes: Mapping[str, Outcome], versions: Versions) -> Iterator[Finding]:
    """A finding for each installed backend, followed by its facts about this machine."""
    if not outcomes:
        yield Finding("backends", "none is installed", Health.BROKEN, INSTALL)
    for name, outcome in outcomes.items():
        yield backend(name, outcome, versions)
        yield from (fact(name, **told) for told in outcome.told.get("facts", ()))


def backend(name: str, outcome: Outcome, versions: Versions) -> Finding:
    """A backend; if its import fails, it is broken only if its packages are installed."""
    if not outcome.error:
        return Finding(name, f"imports in {outcome.secs:.1f} s")
    groups = RUNTIMES.get(name, ())
    there = [package for group in groups for package in group if package in versions]
    if missing := [" or ".join(group) for group in groups if not set(group) & versions.keys()]:
        fix = f"to serve its models: {_install(name, missing)}"
        return Finding(name, outcome.error, Health.CANNOT, fix)
    slow = "" if outcome.in_time else "--limit-secs N if it is only slow; else "
    return Finding(name, outcome.error, Health.BROKEN, f"{slow}{_mend(there)}")


def fact(name: str, what: str, found: str, fix: str) -> Finding:
    """A property of this machine that changes how the backend serves; a limit has a fix."""
    return Finding(f"{name}: {what}", found, Health.WARNING if fix else Health.OK, fix)


def _install(name: str, missing: Sequence[str]) -> str:
    """The command for what a backend misses; its extra has all that it needs."""
    if extra := EXTRAS.get(name):
        return f"pip install 'sluice[{extra}]' (missing: {', '.join(missing)})"
    return f"install {', '.join(missing)}"


def _mend(packages: list[str]) -> str:
    if not packages:
        return "repair or uninstall the package of the backend"
    return f"pip install --force-reinstall --no-deps {' '.join(packages)}, of a version in range"
