"""Servers of models in three clouds: first and second start, poll, faults, and the commands."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.cli import main
from gateway.errors import InferenceError
from gateway.in_process.server import Server
from gateway.storage.mirror import downloads, opening
from gateway.storage.mirror.downloads import Transfers
from gateway.storage.remote.clients import open_store
from gateway.storage.remote.objects import Patience
from tests.conformance.models import REPEAT
from tests.e2e.object_storage.clouds import Bucket
from tests.e2e.object_storage.faulty_proxy import LISTS, FaultyProxy, cut, refused

POLL_SECS = 0.1
SCALE = 180
SLOW_DOWN = refused(503, "SlowDown")
ALWAYS = 10_000
POLL = {"model_control_mode": "poll", "repository_poll_secs": POLL_SECS}
SOON_SECS = 30
CONTENT = bytes(range(256)) * 400

Use = Callable[[Bucket], str]


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Put a model into a bucket and its credentials into the environment; returns its address."""
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))

    def used(bucket: Bucket) -> str:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        bucket.put("models/repeat/config.pbtxt", REPEAT.encode())
        bucket.put("models/repeat/1/never fetched", b"1")
        bucket.put("models/repeat/2/a+b c.bin", CONTENT)
        return f"{bucket.address}/models"

    return used


@asynccontextmanager
async def serving(address: str, **options: Any) -> AsyncIterator[Server]:
    settled = {"repository_settle_secs": 0.0, **options}
    async with Server(model_repository=address, **settled) as server:
        yield server


def files_of(folder: Path) -> dict[str, int]:
    found = (each for each in (folder / "cache/remote/trees").rglob("*") if each.is_file())
    return {each.name: each.stat().st_size for each in found if each.suffix != ".json"}


async def ready_versions(server: Server) -> set[tuple[str, str]]:
    return set(await server.async_models(exclude_not_ready=True))


async def until(server: Server, *wanted: tuple[str, str]) -> None:
    async with asyncio.timeout(SOON_SECS):
        while await ready_versions(server) != {*wanted}:  # noqa: ASYNC110 - a client can only ask
            await asyncio.sleep(POLL_SECS)


async def test_a_model_of_each_cloud_is_served_and_then_without_it(
    cloud_bucket: Bucket, use: Use, tmp_path: Path
) -> None:
    address = use(cloud_bucket)
    async with serving(address) as server:
        assert await ready_versions(server) == {("repeat", "2")}
    assert files_of(tmp_path) == {"config.pbtxt": len(REPEAT), "a+b c.bin": len(CONTENT)}
    async with serving(address, remote_offline=True) as server:
        assert await ready_versions(server) == {("repeat", "2")}


async def test_a_poll_loads_a_new_version_and_unloads_a_model_that_is_gone(
    s3_bucket: Bucket, use: Use
) -> None:
    address = use(s3_bucket)
    s3_bucket.put("models/gone/config.pbtxt", REPEAT.encode())
    s3_bucket.put("models/gone/1/x", b"1")
    async with serving(address, **POLL) as server:
        assert await ready_versions(server) == {("repeat", "2"), ("gone", "1")}
        s3_bucket.put("models/repeat/3/more.bin", b"3")
        for name in ("config.pbtxt", "1/x"):
            s3_bucket.delete(f"models/gone/{name}")
        await until(server, ("repeat", "3"))
        assert 'gateway_remote_up{repository="' in await server.async_metrics()


async def test_a_download_that_is_cut_continues(
    proxied_bucket: Bucket, proxy: FaultyProxy, use: Use
) -> None:
    address = use(proxied_bucket)
    proxy.break_next(cut(after=1000), of="a%2Bb")
    async with serving(address) as server:
        assert await ready_versions(server) == {("repeat", "2")}


async def test_a_storage_that_refuses_is_the_error_of_the_start(
    proxied_bucket: Bucket, proxy: FaultyProxy, use: Use
) -> None:
    address = use(proxied_bucket)
    proxy.break_next(refused(403, "AccessDenied"), of=LISTS, times=4)
    with pytest.raises(InferenceError, match="AccessDenied"):
        async with serving(address):
            pass


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused requests are repeated for a second in place of 3 minutes, with short pauses.

    The minute of an overload is so a third of a second in these tests: a few refusals. A listing is
    tried twice at once, in place of 11 times.
    """
    monkeypatch.setattr(downloads, "SLOW_SECS", downloads.SLOW_SECS / SCALE)
    monkeypatch.setattr(opening, "Transfers", partial(Transfers, pause_secs=0.05))
    twice = Patience(retries=1, within_s=60)
    monkeypatch.setattr(opening, "open_store", partial(open_store, listed=twice))


async def ask(server: Server, model: str, version: int | str = "") -> None:
    """Have a version answer, by default the one of requests without a version."""
    inputs = {"text_input": ["x"], "n": np.ones(1, np.int32)}
    response = await server.model(model, version).async_infer(inputs=inputs).only()
    assert response.outputs["text_output"].tolist() == [b"x"]


def put_neighbour(bucket: Bucket) -> None:
    bucket.put("models/neighbour/config.pbtxt", REPEAT.encode())
    bucket.put("models/neighbour/1/x", b"1")


@pytest.mark.usefixtures("hurried")
async def test_a_start_waits_for_a_storage_that_is_overloaded_for_a_while(
    proxied_bucket: Bucket, proxy: FaultyProxy, use: Use, tmp_path: Path
) -> None:
    address = use(proxied_bucket)
    proxy.break_next(SLOW_DOWN, of=LISTS, times=3)
    proxy.break_next(SLOW_DOWN, of="a%2Bb", times=5)
    async with serving(address) as server:
        await ask(server, "repeat", 2)
    assert sum("a%2Bb" in path for path in proxy.paths) == 6
    (file,) = (tmp_path / "cache/remote/trees").rglob("a+b c.bin")
    assert file.read_bytes() == CONTENT


@pytest.mark.usefixtures("hurried")
async def test_an_overload_without_end_is_the_error_of_a_start_without_a_cache(
    proxied_bucket: Bucket, proxy: FaultyProxy, use: Use
) -> None:
    address = use(proxied_bucket)
    proxy.break_next(SLOW_DOWN, of=LISTS, times=ALWAYS)
    with pytest.raises(InferenceError, match=r"503 SlowDown: .*; try again later"):
        async with serving(address):
            pass


@pytest.mark.usefixtures("hurried")
async def test_an_overload_without_end_fails_one_model_of_a_start(
    proxied_bucket: Bucket, proxy: FaultyProxy, use: Use
) -> None:
    address = use(proxied_bucket)
    put_neighbour(proxied_bucket)
    proxy.break_next(SLOW_DOWN, of="a%2Bb", times=ALWAYS)
    chosen = {"model_control_mode": "explicit", "load_model": ["*"]}
    async with serving(address, **chosen, exit_on_error=False) as server:
        failed = (await server.async_models())["repeat", "2"]
        assert re.search(r"repeat/2/a\+b c\.bin': 503 SlowDown: .*; try again later", failed.reason)
        await ask(server, "neighbour")
        proxy.break_none()
        await server.async_load("repeat")
        await ask(server, "repeat", 2)


@pytest.mark.usefixtures("hurried")
async def test_the_version_before_answers_while_a_poll_waits_for_an_overloaded_storage(
    proxied_bucket: Bucket, proxy: FaultyProxy, use: Use
) -> None:
    address = use(proxied_bucket)
    put_neighbour(proxied_bucket)
    async with serving(address, **POLL) as server:
        proxy.break_next(SLOW_DOWN, of=LISTS, times=3)
        proxy.break_next(SLOW_DOWN, of="new.bin", times=5)
        proxied_bucket.put("models/repeat/3/new.bin", CONTENT)
        async with asyncio.timeout(SOON_SECS):
            while ("repeat", "3") not in await ready_versions(server):
                await ask(server, "repeat")
                await ask(server, "neighbour")
                await asyncio.sleep(POLL_SECS)
        await ask(server, "repeat", 3)
    assert sum("new.bin" in path for path in proxy.paths) == 6


@pytest.mark.usefixtures("hurried")
async def test_an_overload_without_end_at_a_poll_leaves_the_version_before(
    proxied_bucket: Bucket, proxy: FaultyProxy, use: Use
) -> None:
    address = use(proxied_bucket)
    put_neighbour(proxied_bucket)
    async with serving(address, **POLL) as server:
        proxy.break_next(SLOW_DOWN, of="new.bin", times=ALWAYS)
        proxied_bucket.put("models/repeat/3/new.bin", CONTENT)
        async with asyncio.timeout(SOON_SECS):
            while "SlowDown" not in (await reason_of(server, "repeat", "3")):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECS)
        await ask(server, "repeat", 2)
        await ask(server, "neighbour")
        proxy.break_none()
        proxied_bucket.put("models/repeat/3/new.bin", CONTENT[::-1])
        await until(server, ("repeat", "3"), ("neighbour", "1"))


async def reason_of(server: Server, model: str, version: str) -> str:
    """The reason of the state of a version; "" without one."""
    found = (await server.async_models()).get((model, version))
    return found.reason if found is not None else ""


def test_a_fetch_writes_warnings_as_a_server_does(
    s3_bucket: Bucket, use: Use, capsys: pytest.CaptureFixture[str]
) -> None:
    address = use(s3_bucket)
    s3_bucket.put(f"models/repeat/{'x' * 256}", b"by mistake")
    main(["fetch", "--repository-settle-secs=0", address])
    found = capsys.readouterr().err
    assert "objects ignored, their keys are no paths of files address=" in found
    assert f"first='repeat/{'x' * 256}' count=1" in found


def test_a_cache_is_filled_listed_verified_and_cleaned(
    s3_bucket: Bucket, use: Use, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = use(s3_bucket)
    main(["fetch", "--repository-settle-secs=0", address])
    name, _, folder = capsys.readouterr().out.strip().partition(": ")
    assert name == "repeat 2"
    assert (Path(folder) / "a+b c.bin").read_bytes() == CONTENT
    with pytest.raises(SystemExit):
        main(["fetch", "--repository-settle-secs=0", address, "unknown"])
    assert "model 'unknown' is not in any repository" in capsys.readouterr().err
    main(["cache", "list"])
    shown = capsys.readouterr().out
    assert "whole" in shown
    assert "".join(re.findall(r"(?m)^│ (\S+)", shown)) == f"{address}/repeat"
    main(["cache", "verify"])
    assert capsys.readouterr().out == "0 damaged files\n"
    (Path(folder) / "a+b c.bin").chmod(0o600)
    (Path(folder) / "a+b c.bin").write_bytes(b"damaged")
    with pytest.raises(SystemExit):
        main(["cache", "verify"])
    assert f"damaged, deleted: {address}/repeat/2/a+b c.bin\n" in capsys.readouterr().out
    main(["cache", "clean"])
    assert files_of(tmp_path) == {}
