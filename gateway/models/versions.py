"""Which folders of a model are versions, and which versions does a policy serve?"""

from collections.abc import Iterable

from gateway.config import VersionPolicy

RESERVED = frozenset({"warmup", "initial_state", "configs"})
"""Folders of a model that are never versions."""

HIGHEST = 2**63 - 1


def version_number(folder: str) -> int | None:
    """The version that a folder of this name holds, or None."""
    if not (folder.isascii() and folder.isdigit()) or int(folder) > HIGHEST:
        return None
    return int(folder) if str(int(folder)) == folder else None


def select_versions(policy: VersionPolicy | None, available: Iterable[int]) -> tuple[int, ...]:
    """The versions that the policy serves, ascending; no policy means the highest one."""
    ascending = sorted(available)
    if policy is None:
        return tuple(ascending[-1:])
    if policy.specific is not None:
        return tuple(each for each in ascending if each in policy.specific.versions)
    if policy.latest is not None:
        count = policy.latest.num_versions
        return tuple(ascending[len(ascending) - min(count, len(ascending)) :])
    return tuple(ascending)
