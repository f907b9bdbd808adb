"""Identities of loads: equal ones have equal responses in a cache, and equal facts."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from gateway import __version__
from gateway.config import ModelConfig
from gateway.models.model_folder import by_version, take_snapshot
from gateway.models.repository import LoadSource

RANDOM_BYTES = 16


def rescanned(source: LoadSource) -> LoadSource:
    """The source with the present state of its files; blocks."""
    return replace(source, snapshot=take_snapshot(source.folder))


def private_load(source: LoadSource, config: ModelConfig, version: int, folder: Path) -> bytes:
    """An identity that no other load has."""
    return os.urandom(RANDOM_BYTES)


def shared_load(source: LoadSource, config: ModelConfig, version: int, folder: Path) -> bytes:
    """The identity of every load of a version's files and config by this release, in any process.

    Files are the same if their names, sizes and modification times are; `folder` is the version's.
    Other versions, the version policy and the text of the config are no part of it.
    """
    within = folder.is_relative_to(source.folder)
    stored = () if within else sorted(take_snapshot(folder).items())
    found = by_version(source.snapshot)
    files = sorted([*found[None].items(), *found.get(version, {}).items()])
    known = (__version__, replace(config, version_policy=None), files, stored)
    return hashlib.blake2b(repr(known).encode("utf-8", "surrogatepass")).digest()
