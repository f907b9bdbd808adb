"""Parameters of models (`parameters` of config.pbtxt), and the budget of threads on the CPU.

PyTorch gives every calling thread a pool of its own, of the size last set on that thread: instances
would together use many times the machine's cores.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from backends.pytorch.model_file import reason
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.process_limits import processors
from gateway.tensor_runtime.parameters import as_boolean, as_integer

log = logging.getLogger("sluice.pytorch")


@dataclass(frozen=True, slots=True, kw_only=True)
class PytorchParameters:
    """The parameters of one model; None keeps PyTorch's setting.

    A thread count of zero means that the model sets none.
    """

    inference_mode: bool = True
    disable_optimized_execution: bool = False
    enable_weight_sharing: bool = False
    enable_cache_cleaning: bool = False
    disable_cudnn: bool = False
    enable_jit_executor: bool | None = None
    enable_jit_profiling: bool | None = None
    enable_tensor_fuser: bool | None = None
    intra_op_thread_count: int = 0
    inter_op_thread_count: int = 0

    @classmethod
    def read(cls, config: ModelConfig) -> "PytorchParameters":
        """The parameters in a config; INVALID_ARG for an invalid value. Other keys are ignored."""
        found = {
            key.lower(): _value(config, key)
            for key in config.parameters
            if key.isupper() and key.lower() in cls.__dataclass_fields__
        }
        return cls(**found)  # type: ignore[arg-type]  # each value has the type of its field


def _value(config: ModelConfig, key: str) -> bool | int:
    text = config.parameters[key]
    try:
        if key.endswith("_THREAD_COUNT"):
            return _count(text)
        return as_boolean(text)
    except ValueError as error:
        raise InferenceError(
            Code.INVALID_ARG, f"model '{config.name}', parameter '{key}': {error}"
        ) from None


def _count(text: str) -> int:
    """A count of threads, zero if not positive; ValueError with Triton's text."""
    return max(0, as_integer(text))


def thread_count(settings: Mapping[str, str]) -> int:
    """The `thread-count` of `--backend-config`; zero if it is missing."""
    try:
        return _count(settings.get("thread-count", "0"))
    except ValueError as error:
        raise InferenceError(
            Code.INVALID_ARG, f"--backend-config=pytorch,thread-count: {error}"
        ) from None


class ThreadBudget:
    """At most `budget` threads, shared by all instances on the CPU.

    Every run takes the same share of it: INTRA_OP_THREAD_COUNT if a model has set it, else the
    budget divided by the number of instances, at least one. A run waits until its share is free.
    """

    def __init__(self, budget: int = 0) -> None:
        self.budget = budget or processors()
        self._changed = threading.Condition()
        self._free = self.budget
        self._instances = 0
        self._intra_op = 0
        self._inter_op = 0

    @property
    def share(self) -> int:
        """The threads of one run at present."""
        asked = self._intra_op or self.budget // max(1, self._instances)
        return max(1, min(asked, self.budget))

    def join(self) -> None:
        """Count one more instance on the CPU."""
        with self._changed:
            self._instances += 1

    def leave(self) -> None:
        """Count one instance less; its last run has ended."""
        with self._changed:
            self._instances -= 1

    @contextmanager
    def taken(self) -> Iterator[int]:
        """Take one share of the threads for the calling thread's pool, within the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= self.share)
            share = self.share
            self._free -= share
        try:
            torch.set_num_threads(share)
            yield share
        finally:
            with self._changed:
                self._free += share
                self._changed.notify_all()

    def ask(self, intra_op: int, inter_op: int, model: str) -> None:
        """Set the counts of a model; they hold for the process, so the first model wins."""
        with self._changed:
            if intra_op:
                self._intra_op = self._intra_op or intra_op
                _note_if_other(model, "INTRA_OP_THREAD_COUNT", intra_op, self._intra_op)
            if intra_op > self.budget:
                _note_if_other(model, "INTRA_OP_THREAD_COUNT", intra_op, self.budget)
            if inter_op and not self._inter_op:
                self._inter_op = _set_inter_op(inter_op)
            if inter_op:
                _note_if_other(model, "INTER_OP_THREAD_COUNT", inter_op, self._inter_op)


def _set_inter_op(count: int) -> int:
    """Set it, unless PyTorch has started that pool; returns the count in use."""
    try:
        torch.set_num_interop_threads(count)
    except (RuntimeError, ValueError) as error:
        log.warning("inter-op threads not set", extra={"why": reason(error)})
    return int(torch.get_num_interop_threads())


def _note_if_other(model: str, parameter: str, wanted: int, have: int) -> None:
    if wanted != have:
        log.warning(
            "thread count not applied",
            extra={"model": model, "parameter": parameter, "wanted": wanted, "have": have},
        )
