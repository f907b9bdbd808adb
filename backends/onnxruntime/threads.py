"""How many threads may the instances of ONNX models use?

A session of n threads computes on the thread that runs it and on n - 1 of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from backends.onnxruntime.parameters import count, switch
from gateway.config import InstanceKind, ModelConfig
from gateway.cpus import processors

INTRA = "intra_op_thread_count"
INTER = "inter_op_thread_count"
GLOBAL = "enable-global-threadpool"


@dataclass(frozen=True, slots=True)
class SessionThreads:
    """The threads of one session: within one operator, and of operators side by side."""

    intra: int
    inter: int

    @classmethod
    def read(cls, config: ModelConfig, settings: Mapping[str, str]) -> "SessionThreads":
        """What the model's parameters say, or else `--backend-config`.

        Where neither does (or says 0), the instances of a model share the cores: together they
        have one thread per core, and each has at least one.
        """
        share = max(1, processors() // _instances(config))
        return cls(
            count(config.parameters, INTRA) or count(settings, INTRA) or share,
            count(config.parameters, INTER) or count(settings, INTER) or share,
        )


@dataclass(frozen=True, slots=True)
class SharedThreads:
    """One pool for all sessions: its size, and how many may run at once.

    Runs compute on threads of their own beside those of the pool. The two are sized so that
    together they never use more threads than configured.
    """

    pool: int
    runs: int
    inter: int

    @classmethod
    def read(cls, settings: Mapping[str, str]) -> "SharedThreads | None":
        """What `--backend-config` says; None if every session is to have its own threads."""
        if not switch(settings, GLOBAL, default=False):
            return None
        threads = count(settings, INTRA) or processors()
        runs = max(1, threads // 2)
        return cls(threads - runs + 1, runs, count(settings, INTER) or 1)


def _instances(config: ModelConfig) -> int:
    """How many instances compute on the CPU; those on a GPU leave it nearly alone."""
    on_cpu = [group for group in config.instance_group if group.kind is not InstanceKind.KIND_GPU]
    return sum(max(1, group.count) for group in on_cpu) or 1
