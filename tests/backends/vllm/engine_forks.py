"""Processes of vLLM that fork from one that has imported vLLM, instead of importing it again."""

import multiprocessing
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import pytest

SETTINGS = "vllm_config"


class EngineFork(ForkProcess):
    """A process that unpickles its settings, as a spawned one does: so it follows its parent."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._pickled = pickle.dumps(self._kwargs[SETTINGS])

    def run(self) -> None:
        """Call the target; warnings, which are errors in tests, are none here."""
        warnings.simplefilter("default")
        self._kwargs[SETTINGS] = pickle.loads(self._pickled)
        super().run()


class EngineForks(ForkContext):
    """The context of such processes."""

    Process = EngineFork


@contextmanager
def engines_fork() -> Iterator[None]:
    """In this block processes of vLLM are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method=None: EngineForks())
        yield
