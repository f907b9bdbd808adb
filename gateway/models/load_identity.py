"""What tells one load of a model from another, for answers that are kept?"""

import hashlib
import os
from pathlib import Path

from gateway import __version__
from gateway.config import ModelConfig
from gateway.models.model_folder import take
from gateway.models.repository import Source

RANDOM_BYTES = 16


def private_load(source: Source, config: ModelConfig, folder: Path) -> bytes:
    """This load and no other."""
    return os.urandom(RANDOM_BYTES)


def shared_load(source: Source, config: ModelConfig, folder: Path) -> bytes:
    """Every load of the same files with the same config, by this release, in whatever process.

    Files are the same if their names, sizes and times of change are; `folder` has the version's.
    """
    within = folder.is_relative_to(source.folder)
    stored = () if within else sorted(take(folder).items())
    known = (__version__, config, sorted(source.snapshot.items()), stored)
    return hashlib.blake2b(repr(known).encode("utf-8", "surrogatepass")).digest()
