"""Processes of vLLM that fork from one that has imported vLLM, instead of importing it again."""

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from backends.vllm.backend import VllmBackend
from tests.forked_children import children_fork

OF_WORKERS = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.sample.rejection_sampler",
    "vllm.model_executor.layers.quantization.online.base",
)
"""Modules that each worker of an engine imports, for a second, and the gateway does not."""


def preload() -> None:
    """Import vLLM as the gateway does, in a thread.

    After an import in the main thread, engines of tests that have ended are alive until the
    interpreter is not, and complain then.
    """
    _find_title()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(VllmBackend).result()
        for module in OF_WORKERS:
            thread.submit(importlib.import_module, module).result()


@contextmanager
def engines_fork() -> Iterator[None]:
    """In this block processes of engines are forks of this process, as it is when it begins."""
    _find_title()
    with children_fork():
        yield


def _find_title() -> None:
    """Find the place of the process's title; forks have another environment behind it."""
    import setproctitle  # a requirement of vLLM

    setproctitle.getproctitle()
