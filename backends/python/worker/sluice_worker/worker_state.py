"""State of this worker process, for functions that model.py calls by name."""

from dataclasses import dataclass
from enum import IntEnum

from .connection import GatewayConnection
from .errors import TritonModelException
from .work import GatewayCalls, WorkSocket


class LifeStage(IntEnum):
    """Stages of a worker; they decide which calls model.py may make."""

    STARTING = 0
    COMPLETING = 1
    INITIALIZING = 2
    SERVING = 3
    FINALIZING = 4


@dataclass
class WorkerState:
    """The parts of this process that model.py's API uses."""

    connection: GatewayConnection
    calls: GatewayCalls
    work: WorkSocket
    stage: LifeStage = LifeStage.STARTING
    model_folder: str = ""


_workers: list[WorkerState] = []


def set_worker(worker: WorkerState) -> None:
    """Set the state of this process; once, at its start."""
    _workers[:] = [worker]


def worker() -> WorkerState:
    """The state of this process; TritonModelException if it is no worker."""
    if not _workers:
        raise TritonModelException("this works only in the process that serves the model")
    return _workers[0]


def get_model_dir() -> str:
    """The folder of the model's version."""
    return worker().model_folder
