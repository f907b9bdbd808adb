"""Which GPUs may models have, and how full may those be?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway.cuda_driver import CudaFailed, load_driver, memory_in_use
from gateway.errors import Code, InferenceError
from gateway.settings import GpuSettings


def every_backend(backend: str) -> bool:
    """Whether a backend's runtime computes on GPUs, where nobody has asked it."""
    return True


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of this machine that are used.

    `usable` are the numbers of those whose compute capability is at least `minimum`. `serve` tells
    of a backend whether its runtime, as it is installed, computes on GPUs; it is only asked if
    there is one, and may import for seconds.
    """

    usable: tuple[int, ...] = ()
    minimum: tuple[int, int] = GpuSettings().min_compute_capability
    serve: Callable[[str], bool] = field(default=every_backend, compare=False)


NO_GPUS = Gpus()


def check_memory(model: str, gpu: int, limits: Mapping[int, float]) -> None:
    """Raise UNAVAILABLE if more than the GPU's limit of its memory is taken; blocks.

    `limits` are fractions by GPU; one without is not looked at (models: `--model-load-gpu-limit`).
    """
    if gpu not in limits:
        return
    try:
        used = memory_in_use(load_driver(), gpu)
    except CudaFailed as error:
        raise InferenceError(
            Code.UNAVAILABLE,
            f"can not create model '{model}': the memory of GPU {gpu}, which has a limit, cannot "
            f"be read ({error})",
        ) from None
    if used > limits[gpu]:
        raise InferenceError(
            Code.UNAVAILABLE,
            f"can not create model '{model}': memory limit set for GPU {gpu} has exceeded, model "
            f"loading is rejected. ({used:.0%} is in use, the limit is {limits[gpu]:.0%})",
        )
