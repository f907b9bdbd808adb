"""Health checks of workers."""

import asyncio
from typing import cast

from backends.python.connection import FrameSocket
from backends.python.worker_process import Pulse
from tests.builders import soon

INTERVAL_SECS = 0.4


class Control:
    """Stands for the control socket of a worker; keeps the time of the latest ping."""

    def __init__(self) -> None:
        self.pinged_at = 0.0
        self.pinged = asyncio.Event()

    def send(self, header: bytes) -> None:
        self.pinged_at = asyncio.get_running_loop().time()
        self.pinged.set()


def silent() -> None:
    raise AssertionError("three pings have no answer")


async def test_workers_with_the_same_interval_are_pinged_together() -> None:
    controls = [Control(), Control()]
    pulses = [Pulse(cast(FrameSocket, each), silent) for each in controls]
    pulses[0].every(INTERVAL_SECS)
    await asyncio.sleep(INTERVAL_SECS / 2)
    pulses[1].every(INTERVAL_SECS)
    for _ in range(3):
        for pulse, control in zip(pulses, controls, strict=True):
            pulse.answered()
            control.pinged.clear()
        for control in controls:
            await soon(control.pinged.wait())
    for pulse in pulses:
        pulse.stop()
    assert abs(controls[0].pinged_at - controls[1].pinged_at) < INTERVAL_SECS / 4
