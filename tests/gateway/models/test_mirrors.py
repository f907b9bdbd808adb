"""Models in object storage load, change and go as those of folders; failures there end none."""

from datetime import timedelta
from pathlib import Path

import pytest

from gateway.storage.remote.objects import RemoteObject
from tests.gateway.models.mirrored import POLL, Open, config, polled, versions
from tests.registries import ALL_VERSIONS, ScriptedBackend, Start, write
from tests.remote_stores import MemoryStore


async def test_only_served_versions_are_fetched(
    store: MemoryStore, mirror_of: Open, start: Start, backend: ScriptedBackend
) -> None:
    control = await start(mirror_of(store))
    assert versions(control.registry, "m") == ["3"]
    assert sorted(store.reads) == [
        *("m/3/weights", "m/config.pbtxt", "m/labels.txt", "n/1/weights", "n/config.pbtxt")
    ]
    assert store.lists == [""]
    folder = backend.contexts["m 3"][0].path
    assert (folder / "weights").read_bytes() == b"m3"
    assert (folder.parent / "labels.txt").read_bytes() == b"labels"


async def test_the_lowest_version_decides_the_default_file_without_a_fetch(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    store.put("o/1/model.onnx", b"1")
    store.put("o/2/model.onnx", b"2")
    mirror = mirror_of(store)
    control = await start(mirror)
    assert "unable to find backend 'onnxruntime'" in control.registry.failures()["o version 2"]
    assert "o/1/model.onnx" not in store.reads


async def test_a_second_start_fetches_nothing(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    await start(mirror_of(store))
    await start.stop()
    store.reads.clear()
    store.lists.clear()
    control = await start(mirror_of(store))
    assert versions(control.registry, "m") == ["3"]
    assert (store.reads, store.lists) == ([], [""])


async def test_a_new_version_is_one_load_and_none_of_the_others_bytes(
    store: MemoryStore, mirror_of: Open, start: Start, backend: ScriptedBackend
) -> None:
    store.put("m/config.pbtxt", config(ALL_VERSIONS))
    control = await start(mirror_of(store), **POLL)
    assert versions(control.registry, "m") == ["1", "2", "3"]
    store.reads.clear()
    store.lists.clear()
    store.put("m/4/weights", b"m4")
    await polled(control)
    assert versions(control.registry, "m") == ["1", "2", "3", "4"]
    assert store.reads == ["m/4/weights"]
    assert store.lists == ["", ""]
    assert [len(backend.instances[f"m {each}"]) for each in (1, 2, 3, 4)] == [1, 1, 1, 1]


async def test_more_instances_of_a_version_have_its_folder(
    store: MemoryStore, mirror_of: Open, start: Start, backend: ScriptedBackend
) -> None:
    control = await start(mirror_of(store), **POLL)
    store.put("n/config.pbtxt", config("instance_group { count: 2 kind: KIND_CPU }"))
    await polled(control)
    contexts = backend.contexts["n 1"]
    assert len(contexts) >= 2
    assert len({each.path for each in contexts}) == 1
    assert (contexts[-1].path / "weights").read_bytes() == b"n1"


async def test_an_unsettled_change_is_not_loaded(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    control = await start(mirror_of(store), **POLL)
    store.put("m/.uploading")
    store.put("m/4/weights", b"half")
    store.put("n/2/weights", b"young", age_secs=0)
    await polled(control, 3)
    assert versions(control.registry, "m") == ["3"]
    assert versions(control.registry, "n") == ["1"]
    store.put("m/4/weights", b"whole")
    store.delete("m/.uploading")
    store.at += timedelta(seconds=6)
    await polled(control)
    assert versions(control.registry, "m") == ["4"]
    assert versions(control.registry, "n") == ["2"]


async def test_a_start_waits_for_the_end_of_an_upload(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    store.put("m/3/weights", b"young", age_secs=0)
    mirror = mirror_of(store, settle_secs=0.01)
    assert mirror.is_settling
    store.at += timedelta(seconds=1)
    control = await start(mirror)
    assert versions(control.registry, "m") == ["3"]
    assert store.lists == ["", ""]


async def test_a_model_that_vanished_is_unloaded_after_two_listings(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    control = await start(mirror_of(store), **POLL)
    store.delete("n")
    await polled(control, 1)
    assert versions(control.registry, "n") == ["1"]
    await polled(control, 1)
    assert versions(control.registry, "n") == []
    assert versions(control.registry, "m") == ["3"]


async def test_an_emptied_repository_unloads_nothing(
    store: MemoryStore, mirror_of: Open, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    control = await start(mirror_of(store), **POLL)
    store.delete("m")
    store.delete("n")
    await polled(control, 3)
    assert (versions(control.registry, "m"), versions(control.registry, "n")) == (["3"], ["1"])
    assert "remote repository is empty, its models stay" in caplog.messages


async def test_a_storage_that_is_down_unloads_nothing_and_folders_are_polled(
    store: MemoryStore,
    mirror_of: Open,
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(tmp_path / "folder", "local", 1)
    control = await start(mirror_of(store), tmp_path / "folder", **POLL)
    store.down = True
    write(tmp_path / "folder", "another", 1)
    await polled(control, 3)
    assert versions(control.registry, "m") == ["3"]
    assert versions(control.registry, "another") == ["1"]
    assert caplog.messages.count("remote repository not listed, its models stay") == 1


async def test_a_start_without_the_storage_serves_the_cache(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    await start(mirror_of(store))
    await start.stop()
    store.down = True
    control = await start(mirror_of(store), **POLL)
    assert versions(control.registry, "m") == ["3"]
    before = control.registry.find("m", "3")
    store.down = False
    await polled(control)
    assert control.registry.find("m", "3") is before


async def test_a_failed_download_keeps_the_version_before(
    store: MemoryStore, mirror_of: Open, start: Start
) -> None:
    control = await start(mirror_of(store), **POLL)
    store.put("m/4/weights", b"m4")

    def fail(each: RemoteObject, start: int) -> None:
        if each.key == "m/4/weights":
            store.down = True
            store._require_up()  # noqa: SLF001

    store.before_read = fail
    await polled(control)
    assert versions(control.registry, "m") == ["3"]
    assert control.registry.find("m", "").ready
    assert "CannotConnect" in control.registry.failures()["m version 4"]
