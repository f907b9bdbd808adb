"""The flag of `sluice serve` about the CPU cores of instances."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence

HostPolicy = tuple[str, frozenset[int]]
CORES = "cpu-cores"
NUMA_NODE = "numa-node"


def host_policy(text: str) -> HostPolicy:
    """`NAME,cpu-cores=FIRST-LAST[,FIRST-LAST...]` of --host-policy: the cores this process has."""
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
    """The cores of each policy; of one that is given twice the last."""
    return dict(given)


def add_flag(group: "argparse._ArgumentGroup") -> None:
    """Add it."""
    group.add_argument(
        "--host-policy",
        action="append",
        default=[],
        type=host_policy,
        metavar="NAME,cpu-cores=FIRST-LAST",
        help="CPU cores of the instances whose group has that host_policy, by default cpu, "
        "gpu_DEVICE or model; may be given several times (default: every core)",
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
