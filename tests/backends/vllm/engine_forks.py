"""Processes of vLLM that fork from one that has imported vLLM, instead of importing it again."""

import multiprocessing.util
import subprocess
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from backends.vllm.backend import VllmBackend
from tests.child_forks import SPAWN, fork_children


def preload() -> None:
    """Import vLLM as the gateway does, in a thread."""
    _find_title()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(VllmBackend).result()


@contextmanager
def engines_fork() -> Iterator[None]:
    """In this block processes of engines are forks of this process, as it is when it begins.

    Warnings, which are errors in tests, are none there.
    """
    _find_title()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(subprocess, "Popen", subprocess.Popen)
        patch.setattr(multiprocessing.util, "spawnv_passfds", SPAWN)
        warnings.simplefilter("default")
        with closing(fork_children()):
            yield


def _find_title() -> None:
    """Find the place of the process's title; forks have another environment behind it."""
    import setproctitle  # a requirement of vLLM

    setproctitle.getproctitle()
