"""State of this worker process, for functions that model.py calls by name."""

from dataclasses import dataclass
from enum import IntEnum

from .connection import Connection
from .errors import TritonModelException
from .work import Calls, Work


class Stage(IntEnum):
    """What model.py may do depends on how far its life has come."""

    STARTING = 0
    COMPLETING = 1
    INITIALIZING = 2
    SERVING = 3
    FINALIZING = 4


@dataclass
class Worker:
    """What model.py's API reaches of its process."""

    connection: Connection
    calls: Calls
    work: Work
    stage: Stage = Stage.STARTING
    model_folder: str = ""


_workers: list[Worker] = []


def set_worker(worker: Worker) -> None:
    """Say what this process is; once, as it starts."""
    _workers[:] = [worker]


def worker() -> Worker:
    """What this process is; TritonModelException if it is no worker."""
    if not _workers:
        raise TritonModelException("this works only in the process that serves the model")
    return _workers[0]


def get_model_dir() -> str:
    """The folder of the model's version."""
    return worker().model_folder
