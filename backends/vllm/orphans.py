"""What becomes of an engine's processes when the gateway is killed? They end, too.

But an interrupt from the terminal is for the gateway alone, which lets requests end first.
"""

import multiprocessing
import os
import select
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from backends.vllm.error_sender import ErrorSender

EXIT_CODE = 1
POLL_SECS = 1.0
THREAD = "follow-parent"


def follow_parent() -> None:
    """In a process that multiprocessing has started: end it as soon as its parent has ended.

    Elsewhere, as in the gateway itself, this does nothing. vLLM calls it in each of its processes,
    where it is an entry point of the group `vllm.general_plugins`.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        follow(parent.pid or 0)


class FollowingSettings(dict[str, Any]):
    """Settings that make a process they are sent to follow the sender, which is its parent.

    They also take it out of the group of processes that a terminal interrupts, and hand it the
    sender of its errors.

    A new process of vLLM waits minutes for a parent that has gone before it loads its plugins;
    what it is sent arrives before that.
    """

    def __init__(self, settings: Mapping[str, Any], errors: ErrorSender) -> None:
        super().__init__(settings)
        self._errors = errors

    def __reduce__(self) -> Any:
        return _arrive, (dict(self), os.getpid(), self._errors)


def _arrive(settings: dict[str, Any], sender: int, errors: ErrorSender) -> FollowingSettings:
    if sender != os.getpid():
        follow(sender)
        errors.watch_log()
        with suppress(PermissionError):  # it leads a session: there is no terminal
            os.setpgrp()
    return FollowingSettings(settings, errors)


def follow(parent: int) -> None:
    """End this process as soon as process `parent`, which has started it, has ended."""
    if all(thread.name != THREAD for thread in threading.enumerate()):
        threading.Thread(target=_end_after, args=(parent,), name=THREAD, daemon=True).start()


def _end_after(parent: int) -> None:
    wait_for_exit(parent)
    # Not sys.exit: the main thread may be computing, or waiting for a parent that has gone.
    os._exit(EXIT_CODE)


def wait_for_exit(parent: int) -> None:
    """Block until this process has no such parent any more; return at once if it never had."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # no such call here, or not allowed
        _poll_for_exit(parent)
        return
    try:
        # Still the parent now means that the descriptor is not that of a later process.
        if os.getppid() == parent:
            _wait_until_readable(descriptor)
    finally:
        os.close(descriptor)


def _wait_until_readable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()


def _poll_for_exit(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECS)
