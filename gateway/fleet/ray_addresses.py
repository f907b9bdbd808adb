"""The addresses of replicas on Ray, as a child process of a router reads them there."""

import asyncio
import logging
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping

import msgspec

from gateway.processes.module_commands import module_command, module_environment

log = logging.getLogger("sluice.fleet")

CHILD = "gateway.fleet.ray_directory"
FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 2.0, 30.0
"""Pause before a child process in place of one that has ended; doubled until it has addresses."""
LONGEST_LINE = 1 << 20


class RayFleet(msgspec.Struct, frozen=True):
    """A fleet on Ray: its name, and the options of its replicas."""

    name: str
    options: tuple[str, ...] = ()

    def values(self, option: str) -> list[str]:
        """The values of an option."""
        given = [each.partition("=") for each in self.options]
        return [value for name, _, value in given if name == option]


class RayTable(msgspec.Struct, frozen=True):
    """A line of the child process: addresses of replicas, and models that lack some.

    `reason` is why there is no new table; then the last one holds.
    """

    replicas: tuple[tuple[str, int], ...] = ()
    troubles: Mapping[str, str] = {}
    reason: str = ""


class RayQuestion(msgspec.Struct, frozen=True):
    """The line that a child process reads first; it makes the controller if it is missing."""

    fleet: RayFleet
    makes_controller: bool


read_table = msgspec.json.Decoder(RayTable).decode
read_question = msgspec.json.Decoder(RayQuestion).decode
encode = msgspec.json.Encoder().encode


async def from_ray(
    fleet: RayFleet, child: str = CHILD
) -> AsyncGenerator[tuple[tuple[str, int], ...], None]:
    """The addresses of the replicas; a child process that ends is started again.

    Ray's library ends its process when the cluster cannot be reached, so that no router loads it.
    """
    logged: dict[str, str] = {}
    has_controller = False
    pause_secs = FIRST_PAUSE_SECS
    while True:
        question = encode(RayQuestion(fleet, not has_controller)) + b"\n"
        async for table in _tables(child, question):
            _log(table, logged)
            if not table.reason:
                has_controller = True
                pause_secs = FIRST_PAUSE_SECS
                yield table.replicas
        await asyncio.sleep(pause_secs)
        pause_secs = min(LONGEST_PAUSE_SECS, 2 * pause_secs)


def _log(table: RayTable, logged: dict[str, str]) -> None:
    """Log each trouble once, until it changes."""
    found = {**table.troubles, **({"": table.reason} if table.reason else {})}
    for model, reason in found.items():
        if logged.get(model) == reason:
            continue
        if model:
            log.warning("replicas lack", extra={"model": model, "reason": reason})
        else:
            log.error("replicas not known", extra={"reason": reason})
    logged.clear()
    logged.update(found)


async def _tables(module: str, question: bytes) -> AsyncGenerator[RayTable, None]:
    """The tables of one child process, until it ends."""
    child = await asyncio.create_subprocess_exec(
        *module_command(module),
        stdin=PIPE,
        stdout=PIPE,
        env=module_environment(),
        limit=LONGEST_LINE,
    )
    try:
        assert child.stdin is not None  # noqa: S101 - it is a pipe
        assert child.stdout is not None  # noqa: S101 - it is a pipe
        child.stdin.write(question)
        reason = ""
        async for line in child.stdout:
            if not line.endswith(b"\n"):
                break  # The child ended within it.
            table = read_table(line)
            reason = table.reason
            yield table
        status = await child.wait()
        yield RayTable(reason=reason or f"{module} ended with status {status}")
    finally:
        await _end(child)


async def _end(child: Process) -> None:
    if child.returncode is None:
        child.kill()
        await child.wait()
