"""Options of GPUs, and of the CPU cores of instances."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence

from gateway.flags.values import count
from gateway.memory_settings import GpuSettings

HostPolicy = tuple[str, frozenset[int]]
CORES = "cpu-cores"
NUMA_NODE = "numa-node"


def compute_capability(text: str) -> tuple[int, int]:
    """`MAJOR.MINOR` of --min-supported-compute-capability, as NVIDIA writes it."""
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no compute capability: expected a number such as 7.5"
        )
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def device_fraction(text: str) -> tuple[int, float]:
    """`GPU:FRACTION` of --model-load-gpu-limit."""
    gpu, _, part = text.partition(":")
    if not (gpu.isdecimal() and re.fullmatch(r"0?\.[0-9]+|[01]|1\.0+|0\.", part)):
        raise argparse.ArgumentTypeError(
            "--model-load-gpu-limit option format is '<device id>:<fraction>', a fraction from 0 "
            f"to 1. Got {text}"
        )
    return int(gpu), float(part)


def device_bytes(text: str) -> tuple[int, int]:
    """`GPU:BYTES` of --cuda-memory-pool-byte-size."""
    gpu, colon, size = text.partition(":")
    if not (colon and gpu.isdecimal() and size.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"--cuda-memory-pool-byte-size option format is '<gpu>:<bytes>'. Got {text}"
        )
    return int(gpu), int(size)


def gpu_settings(flags: argparse.Namespace) -> GpuSettings:
    """Settings from the parsed options."""
    return GpuSettings(
        min_compute_capability=flags.min_supported_compute_capability,
        memory_limits=dict(flags.model_load_gpu_limit),
    )


def add_gpu_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    group = parser.add_argument_group("GPUs")
    group.add_argument(
        "--min-supported-compute-capability",
        type=compute_capability,
        default=GpuSettings().min_compute_capability,
        metavar="MAJOR.MINOR",
        help="ignore GPUs below this compute capability (default: 6.0)",
    )
    group.add_argument(
        "--model-load-gpu-limit",
        type=device_fraction,
        action="append",
        default=[],
        metavar="GPU:FRACTION",
        help="refuse loads on a GPU with a larger fraction of its memory in use; repeatable "
        "(default: no limit)",
    )
    _add_pool_flags(group)


def _add_pool_flags(group: "argparse._ArgumentGroup") -> None:
    """Options without effect; their values are checked, so that a typo is an error."""
    group.add_argument(
        "--pinned-memory-pool-byte-size",
        type=count,
        metavar="BYTES",
        help="accepted for compatibility, no effect: runtimes allocate memory themselves",
    )
    group.add_argument(
        "--cuda-memory-pool-byte-size",
        type=device_bytes,
        action="append",
        metavar="GPU:BYTES",
        help="accepted for compatibility, no effect: runtimes allocate memory themselves",
    )


def host_policy(text: str) -> HostPolicy:
    """`NAME,cpu-cores=FIRST-LAST[,FIRST-LAST...]` of --host-policy: the usable cores of these."""
    name, comma, rest = text.partition(",")
    setting, equals, value = rest.partition("=")
    if not (name and comma and equals):
        raise argparse.ArgumentTypeError(
            "--host-policy option format is '<policy name>,<setting>=<value>'. Got " + text
        )
    if setting == NUMA_NODE:
        raise argparse.ArgumentTypeError(
            f"setting '{NUMA_NODE}' of host policy '{name}' is not supported: name the cores of "
            f"the node with '{CORES}'"
        )
    if setting != CORES:
        raise argparse.ArgumentTypeError(
            f"Unsupported host policy setting '{setting}' is specified, supported settings are "
            f"'{CORES}'"
        )
    return name, _usable(name, value)


def host_policies(given: Sequence[HostPolicy]) -> Mapping[str, frozenset[int]]:
    """The cores of each policy; the last value of a repeated policy counts."""
    return dict(given)


def add_host_policy(group: "argparse._ArgumentGroup") -> None:
    """Add the option to its group."""
    group.add_argument(
        "--host-policy",
        action="append",
        default=[],
        type=host_policy,
        metavar="NAME,cpu-cores=FIRST-LAST",
        help="CPU cores of the instances whose group has that host_policy, by default cpu, "
        "gpu_DEVICE or model; repeatable (default: every core)",
    )


def _usable(name: str, value: str) -> frozenset[int]:
    wanted: set[int] = set()
    usable = _own_cores()
    for part in value.split(","):
        if not re.fullmatch(r"[0-9]{1,6}-[0-9]{1,6}", part):
            raise argparse.ArgumentTypeError(
                f"host policy setting '{CORES}' format is '<lower_cpu_core_id>-"
                f"<upper_cpu_core_id>'. Got {part}"
            )
        first, last = map(int, part.split("-"))
        wanted.update(each for each in usable if first <= each <= last)
    if not wanted:
        raise argparse.ArgumentTypeError(
            f"host policy '{name}' has no core that this process may use: '{CORES}' is {value}, "
            f"expected some of {','.join(map(str, sorted(usable)))}"
        )
    return frozenset(wanted)


def _own_cores() -> frozenset[int]:
    if not hasattr(os, "sched_getaffinity"):
        raise argparse.ArgumentTypeError(
            "--host-policy needs a system where processes can keep to CPU cores, such as Linux"
        )
    return frozenset(os.sched_getaffinity(0))
