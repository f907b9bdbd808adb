"""The addresses of replicas on Ray, as a child process of a router reads them there."""

import asyncio
import logging
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from gateway.fleet.ray_news import ModelNews, OffersByModel, RouterNews
from gateway.processes.module_commands import module_command, module_environment

log = logging.getLogger("sluice.fleet")

CHILD = "gateway.fleet.ray_directory"
FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 2.0, 30.0
"""Pause before a child process in place of one that has ended; doubled until it has addresses."""
LONGEST_LINE = 64 << 20
NEWS_SECS = 1.0
"""The time between two lines for the child process, while there is any need."""


class RayFleet(msgspec.Struct, frozen=True):
    """A fleet on Ray: its name, and the options of its replicas."""

    name: str
    options: tuple[str, ...] = ()

    def values(self, option: str) -> list[str]:
        """The values of an option."""
        given = [each.partition("=") for each in self.options]
        return [value for name, _, value in given if name == option]


class RayTable(msgspec.Struct, frozen=True):
    """A line of the child process: addresses of replicas, all models, and those that lack some.

    Those that are `outdated` have earlier descriptions of their models. `offers` are those that the
    child process has not written yet. `reason` is why there is no new table; then the last one
    holds. `cluster` is the id of the cluster. `is_ended`: the fleet has no controller there any
    more.
    """

    replicas: tuple[tuple[str, int], ...] = ()
    troubles: Mapping[str, str] = {}
    reason: str = ""
    cluster: str = ""
    is_ended: bool = False
    outdated: tuple[tuple[str, int], ...] = ()
    models: Mapping[str, ModelNews] = {}
    offers: OffersByModel = {}


class RayQuestion(msgspec.Struct, frozen=True):
    """The line that a child process reads first: what its router knows of the controller.

    The controller was last seen in `cluster`, and has been ended by a command if `is_ended`.
    """

    fleet: RayFleet
    cluster: str = ""
    is_ended: bool = False

    def makes_controller(self, cluster: str) -> bool:
        """Whether the controller is to be made in a cluster if it is missing.

        A cluster that was restarted without persistence has another id, and no controller.
        """
        return cluster != self.cluster and not self.is_ended

    def after(self, table: RayTable) -> "RayQuestion":
        """The question of the next child process."""
        is_ended = table.is_ended or (self.is_ended and bool(table.reason))
        return RayQuestion(self.fleet, table.cluster or self.cluster, is_ended)


class Correspondent(Protocol):
    """A router, as the child process of its directory knows it."""

    def take_news(self, models: Mapping[str, ModelNews], offers: OffersByModel) -> None:
        """Take all models of the controller, and some offers."""

    def news(self) -> RouterNews:
        """The present needs, and the offers that the controller lacks."""


read_table = msgspec.json.Decoder(RayTable).decode
read_question = msgspec.json.Decoder(RayQuestion).decode
encode = msgspec.json.Encoder().encode


async def from_ray(
    fleet: RayFleet, router: Correspondent, child: str = CHILD
) -> AsyncGenerator[RayTable, None]:
    """The tables with addresses of the replicas; a child process that ends is started again.

    Ray's library ends its process when the cluster cannot be reached, so that no router loads it.
    """
    logged: dict[str, str] = {}
    question = RayQuestion(fleet)
    pause_secs = FIRST_PAUSE_SECS
    while True:
        async for table in _tables(child, encode(question) + b"\n", router):
            _log(table, logged)
            question = question.after(table)
            if not table.reason:
                pause_secs = FIRST_PAUSE_SECS
                router.take_news(table.models, table.offers)
                yield table
        await asyncio.sleep(pause_secs)
        pause_secs = min(LONGEST_PAUSE_SECS, 2 * pause_secs)


def _log(table: RayTable, logged: dict[str, str]) -> None:
    """Log each trouble once, until it changes."""
    found = {**table.troubles, **({"": table.reason} if table.reason else {})}
    for model, reason in found.items():
        if logged.get(model) == reason:
            continue
        if model:
            log.warning("replicas missing", extra={"model": model, "reason": reason})
        else:
            log.error("replicas not known", extra={"reason": reason})
    logged.clear()
    logged.update(found)


async def _tables(
    module: str, question: bytes, router: Correspondent
) -> AsyncGenerator[RayTable, None]:
    """The tables of one child process, until it ends."""
    child = await asyncio.create_subprocess_exec(
        *module_command(module),
        stdin=PIPE,
        stdout=PIPE,
        env=module_environment(),
        limit=LONGEST_LINE,
    )
    assert child.stdin is not None  # noqa: S101 - it is a pipe
    assert child.stdout is not None  # noqa: S101 - it is a pipe
    child.stdin.write(question)
    telling = asyncio.create_task(_tell(child.stdin, router))
    try:
        reason = ""
        async for line in child.stdout:
            if not line.endswith(b"\n"):
                break  # The child ended within it.
            try:
                table = read_table(line)
            except msgspec.DecodeError as error:
                table = RayTable(reason=f"the table of {module} cannot be read: {error}")
            reason = table.reason
            yield table
        status = await child.wait()
        yield RayTable(reason=reason or f"{module} ended with status {status}")
    finally:
        telling.cancel()
        await _end(child)
        await asyncio.wait((telling,))


async def _tell(pipe: asyncio.StreamWriter, router: Correspondent) -> None:
    """Write the news of a router until the child process ends, all of them again and again."""
    written = RouterNews()
    with suppress(ConnectionError):
        while True:
            found = router.news()
            if found != written or found != RouterNews():
                pipe.write(encode(found) + b"\n")
                await pipe.drain()
            written = found
            await asyncio.sleep(NEWS_SECS)


async def _end(child: Process) -> None:
    if child.returncode is None:
        child.kill()
        await child.wait()
