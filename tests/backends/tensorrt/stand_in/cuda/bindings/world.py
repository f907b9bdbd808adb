"""The GPUs that the stand-in pretends: memory of the host, and streams that begin when waited for.

Work given to a stream is done when a thread waits for it, so that memory used again too early
holds what it should not. What is not freed is seen in `leaks`.
"""

import ctypes
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY = 0, 1, 2
INVALID_DEVICE, INVALID_HANDLE, LAUNCH_FAILURE = 101, 400, 719
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901

TEXTS = {
    INVALID_VALUE: "invalid argument",
    OUT_OF_MEMORY: "out of memory",
    INVALID_DEVICE: "invalid device ordinal",
    INVALID_HANDLE: "invalid resource handle",
    LAUNCH_FAILURE: "unspecified launch failure",
    CAPTURE_UNSUPPORTED: "operation not permitted when stream is capturing",
    CAPTURE_INVALIDATED: "operation failed due to a previous error during capture",
}

ENVIRONMENT = "SLUICE_STAND_IN_GPUS"
"""The world of a server that a test starts: JSON of the arguments of `World.reset`."""

Work = Callable[[], None]


class Refused(Exception):
    """A call that ends with a status other than success."""

    def __init__(self, status: int) -> None:
        super().__init__(TEXTS[status])
        self.status = status


@dataclass(eq=False)
class Block:
    """Some memory; `device` is None for that of the host."""

    size: int
    device: int | None
    memory: Any

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)


@dataclass(eq=False)
class Stream:
    device: int
    work: list[Work] = field(default_factory=list)
    capturing: list[Work] | None = None
    captured_by: int = 0
    spoiled: bool = False

    def give(self, work: Work) -> None:
        (self.work if self.capturing is None else self.capturing).append(work)

    def finish(self) -> None:
        """Refused, with the capture spoiled, for a stream that only writes down."""
        if self.capturing is not None:
            self.spoiled = True
            raise Refused(CAPTURE_UNSUPPORTED)
        while self.work:
            self.work.pop(0)()


class World:
    """All devices of the machine, and all that the process has there."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._thread = threading.local()
        self.reset(**json.loads(os.environ.get(ENVIRONMENT, "{}")))

    def reset(
        self,
        gpus: int = 1,
        memory: int = 1 << 30,
        name: str = "Stand-in",
        capability: str = "9.0",
        lost_if: str = "",
    ) -> None:
        """Begin anew. Once there is a file `lost_if`, all devices have failed for good."""
        self.gpus, self.memory, self.name, self.capability = gpus, memory, name, capability
        self.dla_cores = 0
        self._lost_if = lost_if
        self.blocks: dict[int, Block] = {}
        self.handles: dict[int, Any] = {}
        self.counts: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._lost: set[int] = set()
        self.refusals: dict[str, list[int]] = {}
        self._next = 1

    # What tests do.

    def lose(self, device: int) -> None:
        """The device fails for good: every call on it fails from now on."""
        self._lost.add(device)

    def recover(self, device: int) -> None:
        """A device that was lost works again, with all that the process had there."""
        self._lost.remove(device)

    def refuse(self, call: str, status: int) -> None:
        """The next call of that name ends with the status."""
        self.refusals.setdefault(call, []).append(status)

    @property
    def leaks(self) -> dict[str, int]:
        """Objects that are not freed, by kind."""
        return {kind: count for kind, count in self.counts.items() if count}

    # What the libraries do.

    @property
    def lost(self) -> set[int]:
        everything = self._lost_if and os.path.exists(self._lost_if)
        return set(range(self.gpus)) if everything else self._lost

    @property
    def device(self) -> int:
        return getattr(self._thread, "device", 0)

    @device.setter
    def device(self, device: int) -> None:
        self._thread.device = device

    @property
    def last_error(self) -> int:
        """The error of the last failed call of this thread, until it is read."""
        return getattr(self._thread, "last_error", SUCCESS)

    @last_error.setter
    def last_error(self, status: int) -> None:
        self._thread.last_error = status

    def used(self, device: int) -> int:
        return sum(each.size for each in self.blocks.values() if each.device == device)

    def allocate(self, size: int, device: int | None) -> int:
        if size < 1:
            raise Refused(INVALID_VALUE)
        if device is not None and self.used(device) + size > self.memory:
            raise Refused(OUT_OF_MEMORY)
        block = Block(size, device, (ctypes.c_ubyte * size)())
        ctypes.memset(block.address, 0xAB, size)  # contents from before
        self.blocks[block.address] = block
        self.counts["pinned memory" if device is None else "device memory"] += 1
        return block.address

    def free(self, address: int, device: int | None) -> None:
        block = self.blocks.get(address)
        if block is None or block.device != device:
            raise Refused(INVALID_VALUE)
        del self.blocks[address]
        ctypes.memset(block.address, 0xCD, block.size)
        self.counts["pinned memory" if device is None else "device memory"] -= 1

    def require(self, address: int, size: int, device: int | None) -> None:
        """Refused unless `size` bytes are there, of that device or of the host."""
        for block in self.blocks.values():
            end = block.address + block.size
            if block.device == device and block.address <= address and address + size <= end:
                return
        raise Refused(INVALID_VALUE)

    def new_handle(self, kind: str, thing: Any) -> int:
        number, self._next = self._next, self._next + 1
        self.handles[number] = thing
        self.counts[kind] += 1
        return number

    def end_handle(self, kind: str, number: int) -> Any:
        if number not in self.handles:
            raise Refused(INVALID_HANDLE)
        self.counts[kind] -= 1
        return self.handles.pop(number)

    def streams(self) -> list[Stream]:
        """Those of the current device."""
        everything = [each for each in self.handles.values() if isinstance(each, Stream)]
        return [each for each in everything if each.device == self.device]

    def stream(self, number: int) -> Stream:
        found = self.handles.get(number)
        if not isinstance(found, Stream) or found.device != self.device:
            raise Refused(INVALID_HANDLE)
        return found


world = World()
