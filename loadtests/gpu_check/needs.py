"""Which packages of a part are missing, and what are they called where packages come from?"""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

DISTRIBUTIONS = {
    "cuda.bindings": "cuda-bindings",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "markdown_it": "markdown-it-py",
    "pynvml": "nvidia-ml-py",
}
"""By module, where a distribution has a name of its own."""


def missing(modules: Iterable[str]) -> Sequence[str]:
    """The distributions of those modules that are not there; nothing is imported."""
    return [_distribution(module) for module in modules if not _is_there(module)]


def _distribution(module: str) -> str:
    return DISTRIBUTIONS.get(module, module.replace("_", "-"))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
