"""Options of models in memory: loads on demand, and budgets."""

import argparse

from gateway.flags.values import byte_size, natural
from gateway.memory_settings import ModelMemory


def memory_size(text: str) -> int:
    """A size above 0."""
    if size := byte_size(text):
        return size
    raise argparse.ArgumentTypeError(f"'{text}' is no size: expected at least 1 byte")


def gpu_size(text: str) -> tuple[int, int]:
    """`GPU:SIZE` of --gpu-memory."""
    gpu, colon, size = text.partition(":")
    if not (colon and gpu.isascii() and gpu.isdigit()):
        raise argparse.ArgumentTypeError(f"'{text}': expected GPU:SIZE, such as 0:70GiB")
    return int(gpu), memory_size(size)


def memory_budget(flags: argparse.Namespace) -> ModelMemory:
    """Settings from the parsed options; the last value of a repeated GPU counts."""
    return ModelMemory(
        on_demand=flags.on_demand,
        host=flags.model_memory,
        gpus=dict(flags.gpu_memory),
        models=flags.max_resident_models,
    )


def add_memory_flags(group: "argparse._ArgumentGroup") -> None:
    """Add the options to their group."""
    group.add_argument(
        "--on-demand",
        action="store_true",
        help="load models at their first request, and unload those that are not used; a model's "
        "parameter residency may say otherwise (default: off)",
    )
    group.add_argument(
        "--model-memory",
        type=memory_size,
        metavar="SIZE",
        help="most memory of the models on this host, such as 24GiB: others sleep for a model "
        "that is loaded on demand (default: no limit)",
    )
    group.add_argument(
        "--gpu-memory",
        action="append",
        default=[],
        type=gpu_size,
        metavar="GPU:SIZE",
        help="the same on one GPU, such as 0:70GiB; repeatable (default: no limit)",
    )
    group.add_argument(
        "--max-resident-models",
        type=natural,
        default=ModelMemory().models,
        metavar="N",
        help="most versions in memory; 0 for any number (default: %(default)s)",
    )
