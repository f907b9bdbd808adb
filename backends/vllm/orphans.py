"""What becomes of an engine's processes when the gateway is killed? They end, too."""

import multiprocessing
import os
import select
import threading
from multiprocessing.process import BaseProcess
from typing import Any

EXIT_CODE = 1
THREAD = "follow-parent"


def follow_parent() -> None:
    """In a process that multiprocessing has started: end it as soon as its parent has ended.

    Elsewhere, as in the gateway itself, this does nothing. vLLM calls it in each of its processes,
    where it is an entry point of the group `vllm.general_plugins`.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == THREAD for thread in threading.enumerate()):
        return
    threading.Thread(target=_end_after, args=(parent,), name=THREAD, daemon=True).start()


class FollowingSettings(dict[str, Any]):
    """Settings that make the process they are sent to follow its parent.

    vLLM loads its plugins only after a process has talked to its parent, and waits minutes for one
    that has gone. What it sends to a new process arrives before that.
    """

    def __reduce__(self) -> Any:
        return _arrive, (dict(self),)


def _arrive(settings: dict[str, Any]) -> FollowingSettings:
    follow_parent()
    return FollowingSettings(settings)


def _end_after(parent: BaseProcess) -> None:
    wait_for_exit(parent)
    # Not sys.exit: the main thread may be computing, or waiting for a parent that has gone.
    os._exit(EXIT_CODE)


def wait_for_exit(parent: BaseProcess) -> None:
    """Block until the parent process has ended; return at once if it already has.

    The pipe that multiprocessing offers for this stays open while another child of the parent has
    inherited it, so the kernel is asked about the process itself where it can be (Linux).
    """
    try:
        descriptor = os.pidfd_open(parent.pid or 0)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        parent.join()
        return
    try:
        # Alive now means that the descriptor is the parent's and not that of a later process.
        if parent.is_alive():
            _wait_until_readable(descriptor)
    finally:
        os.close(descriptor)


def _wait_until_readable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
