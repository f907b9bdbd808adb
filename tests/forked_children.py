"""Child processes of tests that are forks, instead of interpreters that start afresh."""

import multiprocessing.util
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.child_forks import SPAWN, fork_children


@contextmanager
def children_fork() -> Iterator[None]:
    """In this block children of this process are forks of it, as it is when the block begins.

    Warnings, which are errors in tests, are none there.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(subprocess, "Popen", subprocess.Popen)
        patch.setattr(multiprocessing.util, "spawnv_passfds", SPAWN)
        warnings.simplefilter("default")
        with closing(fork_children()):
            yield
