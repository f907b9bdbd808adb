"""Everything that is looked at, in the order in which it is told."""

from collections.abc import Callable, Mapping, Sequence

from gateway.backend_loader import BackendLoader
from gateway.settings import ENVIRONMENT
from gateway.tools.doctor import backends, cuda, machine, models, packages, ports, probes
from gateway.tools.doctor.declared import DISTRIBUTION, Declared, declared
from gateway.tools.doctor.finding import Finding, Part, Verdict
from gateway.tools.doctor.packages import Versions
from gateway.tools.doctor.probes import Outcome, Question

NVML: Question = ("nvml",)
TORCH: Question = ("torch",)
ONNXRUNTIME: Question = ("onnxruntime",)
UNKNOWN = Finding(
    DISTRIBUTION,
    "neither installed nor in a checkout, so that no range of versions is known",
    Verdict.BROKEN,
    f"pip install {DISTRIBUTION}",
)


def questions(versions: Versions) -> Sequence[Question]:
    """What is tried in processes of their own; the slowest should start early."""
    found = sorted(BackendLoader().names, key=lambda name: name not in ("vllm", "pytorch"))
    asked: list[Question] = [("backend", name) for name in found]
    if "torch" in versions:
        asked.append(TORCH)
    if any(name in versions for name in packages.RUNTIMES["onnxruntime"]):
        asked.append(ONNXRUNTIME)
    return [*asked, NVML]


def examine(limit_secs: float, progress: Callable[[int, Question | None], None]) -> Sequence[Part]:
    """Look at everything; `progress` is told how many probes there are, and of each that ended."""
    wanted = declared()
    names = packages.named(wanted) if wanted else set()
    versions = packages.installed({*names, *sum(map(tuple, packages.RUNTIMES.values()), ())})
    asked = questions(versions)
    progress(len(asked), None)
    outcomes = probes.ask(asked, limit_secs, lambda each: progress(len(asked), each))
    return [
        Part("packages", _packages(wanted, versions, bool(cuda.gpus(outcomes[NVML])))),
        Part("backends", list(backends.findings(_of_backends(outcomes), versions))),
        Part("GPUs", list(_gpus(outcomes))),
        Part("machine", list(machine.findings())),
        Part("models", list(models.findings(ENVIRONMENT))),
        Part("ports", list(ports.findings())),
    ]


def _packages(wanted: Declared | None, versions: Versions, has_gpu: bool) -> Sequence[Finding]:
    return [UNKNOWN] if wanted is None else list(packages.findings(wanted, versions, has_gpu))


def _of_backends(outcomes: Mapping[Question, Outcome]) -> Mapping[str, Outcome]:
    return {asked[1]: outcomes[asked] for asked in sorted(outcomes) if asked[0] == "backend"}


def _gpus(outcomes: Mapping[Question, Outcome]) -> Sequence[Finding]:
    gpus = cuda.gpus(outcomes[NVML])
    found = list(cuda.driver(outcomes[NVML]))
    if TORCH in outcomes:
        found.append(cuda.torch(outcomes[TORCH], gpus))
    if ONNXRUNTIME in outcomes:
        found.append(cuda.onnxruntime(outcomes[ONNXRUNTIME], gpus))
    return found
