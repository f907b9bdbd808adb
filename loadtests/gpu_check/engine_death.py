"""The death of vLLM's engine under load: errors of clients, and time until it serves again."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from loadtests.gpu_check.generation import LONGEST, NAME, write_repository
from loadtests.gpu_check.outcome import Row, descendants, name_of
from loadtests.gpu_check.parts import Asked
from loadtests.support import generation, servers
from loadtests.support.generation import PROMPT_WORDS, Door, Load, ask_once, warm_up
from loadtests.support.http_client import Address, StreamFailed
from loadtests.support.rounds import LoadTestFailed
from loadtests.support.servers import Cpus, Server, read_metrics, serving, total
from loadtests.support.texts import prompts

STREAMS = 8
TOKENS = LONGEST - 2 * PROMPT_WORDS
RUNNING = "vllm:num_requests_running"
ENGINE = "VLLM::Engine"
NOT_READY = 400
"""As Triton answers."""
CLEAR = "engine has stopped"
KNOWN_SECS = 2.0
"""How soon the death of an engine is known (gateway/README.md, When an engine dies)."""
PATIENCE_SECS = 240.0
POLL_SECS = 0.02


def check(asked: Asked) -> Sequence[Row]:
    """Kill it once, while every stream is in flight."""
    with tempfile.TemporaryDirectory() as folder:
        repository = write_repository(Path(folder), asked)
        with serving(servers.gateway(repository).launch(), Cpus()) as server:
            return asyncio.run(_check(server, generation.generate(NAME)))


async def _check(server: Server, door: Door) -> Sequence[Row]:
    requests = asyncio.create_task(_ask_all(server, door))
    await _until("all requests run", lambda: _running(server) >= STREAMS)
    os.kill(_engine(server), signal.SIGKILL)
    killed = time.monotonic()
    gone = await _until("it is not ready", lambda: not _is_ready(server), killed)
    said = await requests
    told = time.monotonic() - killed
    back = await _until("it is ready again", lambda: _is_ready(server), killed)
    await asyncio.to_thread(warm_up, door, Load(STREAMS, 1, 16), server)
    clear = sum(CLEAR in each for each in said)
    return [
        _row("not ready after the kill, s", gone, KNOWN_SECS),
        Row(
            name=f"requests that got the reason, of {STREAMS}",
            gateway=clear,
            ok=clear == STREAMS,
            expected=f"{STREAMS} with '{CLEAR}'" + ("" if clear == STREAMS else f", got {said}"),
        ),
        _row("all of them got it after, s", told, KNOWN_SECS),
        _row(f"serves {STREAMS} requests again after, s", back, PATIENCE_SECS),
    ]


def _row(name: str, secs: float, limit_secs: float) -> Row:
    return Row(name=name, gateway=secs, ok=secs <= limit_secs, expected=f"at most {limit_secs:g}")


async def _ask_all(server: Server, door: Door) -> Sequence[str]:
    """How each request failed; LoadTestFailed if one did not."""
    address, texts = Address(server.ports.http), prompts(PROMPT_WORDS, 1)
    ended = await asyncio.gather(
        *(ask_once(address, door.encode(address, next(texts), TOKENS)) for _ in range(STREAMS)),
        return_exceptions=True,
    )
    if answered := [each for each in ended if not isinstance(each, StreamFailed)]:
        raise LoadTestFailed(f"{len(answered)} requests did not fail: {answered[0]!r:.200}")
    return [str(each) for each in ended]


async def _until(what: str, condition: Callable[[], bool], since: float | None = None) -> float:
    """Seconds until a condition holds, from now or `since` on."""
    began = time.monotonic() if since is None else since
    while not await asyncio.to_thread(condition):
        if time.monotonic() - began > PATIENCE_SECS:
            raise LoadTestFailed(f"not within {PATIENCE_SECS:g} s: {what}")
        await asyncio.sleep(POLL_SECS)
    return time.monotonic() - began


def _running(server: Server) -> float:
    return total(read_metrics(server.ports.metrics), RUNNING)


def _engine(server: Server) -> int:
    engines = [pid for pid in descendants(server.pid) if name_of(pid).startswith(ENGINE)]
    if len(engines) != 1:
        names = [name_of(pid) for pid in descendants(server.pid)]
        raise LoadTestFailed(f"expected one process {ENGINE}..., found {names}")
    return engines[0]


def _is_ready(server: Server) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{server.ports.http}/v2/health/ready", timeout=5) as found:
            return bool(found.status == 200)
    except HTTPError as error:
        if error.code != NOT_READY:
            raise LoadTestFailed(f"ready answers {error.code}, expected 200 or 400") from None
        return False
