"""Loads on request of models in object storage: their downloads, files and metrics."""

import asyncio
import threading
from hashlib import sha256
from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.models import fetching
from gateway.models.repository import LoadSource, ModelId, ModelRepository
from gateway.observability.remote_metrics import remote_families
from gateway.storage.mirror.blobs import PartialBlob
from gateway.storage.mirror.cache import RemoteCache
from gateway.storage.remote.objects import Patience, RemoteListing, RemoteObject
from tests.builders import soon
from tests.gateway.models.mirrored import EXPLICIT, SOON_SECS, Open, config, versions
from tests.registries import ScriptedBackend, Start, write
from tests.remote_stores import MemoryStore


async def test_an_explicit_load_lists_one_model(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    control = await start(mirror_of(store), **EXPLICIT)
    assert store.reads == []
    await soon(control.load("n"))
    store.lists.clear()
    store.reads.clear()
    store.put("n/2/weights", b"n2", age_secs=0)
    store.put("o/config.pbtxt", config(), age_secs=0)
    store.put("o/1/weights", b"o", age_secs=0)
    await soon(control.load("n"))
    assert versions(control.registry, "n") == ["2"]
    assert store.reads == ["n/2/weights"]
    await soon(control.load("o"))
    assert store.lists == ["n", "o"]


async def test_an_explicit_load_of_an_upload_under_way_is_refused(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    control = await start(mirror_of(store), **EXPLICIT)
    await soon(control.load("n"))
    store.put("n/.uploading")
    store.put("n/2/weights", b"half")
    with pytest.raises(InferenceError, match="model 'n' is being uploaded"):
        await soon(control.load("n"))
    assert versions(control.registry, "n") == ["1"]


async def test_a_storage_that_is_down_fails_no_load_of_a_folder(
    store: MemoryStore, mirror_of: Open, start: Start, tmp_path: Path
) -> None:
    write(tmp_path / "folder", "local", 1)
    control = await start(mirror_of(store), tmp_path / "folder", **EXPLICIT)
    store.down = True
    await soon(control.load("local"))
    assert versions(control.registry, "local") == ["1"]
    with pytest.raises(InferenceError, match=r"'unknown'.*CannotConnect"):
        await soon(control.load("unknown"))


async def test_a_listing_that_stalls_takes_no_thread_of_loads(
    store: MemoryStore, mirror_of: Open, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = await start(mirror_of(store), **EXPLICIT, load_thread_count=1)
    reached, held = threading.Event(), threading.Event()

    def stall(under: str, patience: Patience | None) -> RemoteListing:
        if under == "m":
            reached.set()
            held.wait(SOON_SECS)
        return MemoryStore.list(store, under, patience)

    monkeypatch.setattr(store, "list", stall)
    load = asyncio.create_task(control.load("m"))
    try:
        assert await asyncio.to_thread(reached.wait, SOON_SECS)
        await soon(control.load("n"))
        assert not load.done()
    finally:
        held.set()
        await soon(load)


async def test_a_download_shows_its_progress_and_an_unload_ends_it(
    store: MemoryStore, mirror_of: Open, start: Start, tmp_path: Path
) -> None:
    mirror = mirror_of(store)
    control = await start(mirror, **EXPLICIT)
    reached, held = threading.Event(), threading.Event()

    def hold(each: RemoteObject, start: int) -> None:
        if each.key == "m/3/weights":
            reached.set()
            assert held.wait(SOON_SECS)

    store.before_read = hold
    load = asyncio.create_task(control.load("m"))
    try:
        assert await asyncio.to_thread(reached.wait, SOON_SECS)
        for _ in range(1000):
            (row,) = [each for each in await control.index() if each.name == "m"]
            if row.reason:
                break
            await asyncio.sleep(0.01)
        assert (row.state, row.reason) == ("LOADING", "downloading 0.0 of 0.0 GiB")
        await soon(control.load("n"))
        await soon(control.unload("m"))
        with pytest.raises(InferenceError, match="it was unloaded while it was being loaded"):
            await soon(load)
    finally:
        held.set()
        load.cancel()
    assert versions(control.registry, "m") == []
    assert versions(control.registry, "n") == ["1"]


async def test_a_disk_that_hangs_holds_neither_other_loads_nor_an_unload(
    store: MemoryStore, mirror_of: Open, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = await start(mirror_of(store), **EXPLICIT)
    reached, held, seal = threading.Event(), threading.Event(), PartialBlob.seal

    def hang(partial: PartialBlob) -> list[int]:
        if partial.blob.object.key == "m/3/weights":
            reached.set()
            held.wait(SOON_SECS)
        return seal(partial)

    monkeypatch.setattr(PartialBlob, "seal", hang)
    load = asyncio.create_task(control.load("m"))
    try:
        assert await asyncio.to_thread(reached.wait, SOON_SECS)
        await soon(control.load("n"))
        await soon(control.unload("m"))
        with pytest.raises(InferenceError, match="it was unloaded while it was being loaded"):
            await soon(load)
        assert not held.is_set()
    finally:
        held.set()
        load.cancel()
    assert (versions(control.registry, "m"), versions(control.registry, "n")) == ([], ["1"])


async def test_a_cancelled_load_stops_its_download(
    store: MemoryStore, mirror_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def fetch(source: LoadSource, version: int, stopped: threading.Event) -> None:
        begun.set()
        if stopped.wait(SOON_SECS):
            ended.set()

    monkeypatch.setattr(fetching, "fetch", fetch)
    source = ModelRepository([mirror_of(store)]).source(ModelId("m"))

    async def load() -> None:
        async with fetching.Fetches().fetch(source, 3):
            raise AssertionError("nothing is fetched")

    task = asyncio.create_task(load())
    assert await asyncio.to_thread(begun.wait, SOON_SECS)
    task.cancel()
    assert await asyncio.to_thread(ended.wait, SOON_SECS)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_files_of_a_loaded_version_are_in_use_until_it_is_closed(
    store: MemoryStore, mirror_of: Open, start: Start, tmp_path: Path
) -> None:
    control = await start(mirror_of(store), **EXPLICIT)
    cache = RemoteCache(tmp_path / "cache")
    await soon(control.load("n"))
    assert [each.in_use for each in cache.list()] == [True]
    model = control.registry.find("n", "")
    closed = asyncio.Event()
    model.when_closed(closed.set)
    await soon(control.load("m"))
    await soon(control.unload("n"))
    await soon(closed.wait())
    assert {each.address[-1]: each.in_use for each in cache.list()} == {"n": False, "m": True}
    assert model.retired


async def test_files_of_a_failed_load_are_not_in_use(
    store: MemoryStore, mirror_of: Open, start: Start, backend: ScriptedBackend, tmp_path: Path
) -> None:
    control = await start(mirror_of(store), **EXPLICIT)
    backend.errors["n 1"] = RuntimeError("broken")
    with pytest.raises(InferenceError):
        await soon(control.load("n"))
    assert [each.in_use for each in RemoteCache(tmp_path / "cache").list()] == [False]


async def test_a_cache_that_is_too_small_fails_one_load(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    store.put("m/3/weights", b"x" * 10_000)
    control = await start(mirror_of(store, bound=2_000), **EXPLICIT)
    await soon(control.load("n"))
    with pytest.raises(InferenceError, match=r"model 'm' needs .*--remote-cache-size"):
        await soon(control.load("m"))
    assert versions(control.registry, "n") == ["1"]


async def test_checksums_of_a_fetched_version_are_verified(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    def checked(*files: tuple[str, bytes]) -> bytes:
        entries = "".join(
            f'parameters {{ key: "SHA256:{name}" value: "{sha256(content).hexdigest()}" }}'
            for name, content in files
        )
        return config(f'model_repository_agents {{ agents [ {{ name: "checksum" {entries} }} ] }}')

    store.put("m/config.pbtxt", checked(("3/weights", b"m3"), ("1/weights", b"never fetched")))
    store.put("n/config.pbtxt", checked(("1/weights", b"other")))
    control = await start(mirror_of(store))
    assert versions(control.registry, "m") == ["3"]
    assert "Mismatched SHA256 hash" in control.registry.failures()["n version 1"]


async def test_a_bucket_may_be_the_folder_of_one_model(mirror_of: Open, start: Start) -> None:
    store = MemoryStore("s3://bucket/single")
    store.put("config.pbtxt", config())
    store.put("1/weights", b"1")
    control = await start(mirror_of(store), **EXPLICIT)
    await soon(control.load("single"))
    assert versions(control.registry, "single") == ["1"]
    assert store.lists == ["", ""]


async def test_values_of_mirrors_are_metrics(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    control = await start(mirror_of(store))
    found = {
        sample.name: sample.value
        for family in remote_families(control.remote.reading())
        for sample in family.samples
    }
    assert found.pop("gateway_remote_download_seconds_sum") > 0
    assert found == {
        "gateway_remote_up": 1,
        "gateway_remote_cache_bytes": sum(map(len, (config(), config(), b"labels", b"m3", b"n1"))),
        "gateway_remote_bytes_total": found["gateway_remote_cache_bytes"],
        "gateway_remote_requests_total": 1 + 5,
        "gateway_remote_cache_hits_total": 2,
        "gateway_remote_download_seconds_count": 4,
    }
    assert remote_families(None) == []
