"""Listings change the models that a mirror shows only if they are complete, equal and settled."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from gateway.storage.mirror import opening
from gateway.storage.mirror.downloads import Transfers
from gateway.storage.mirror.errors import MirrorError
from gateway.storage.mirror.mirror import Mirror
from gateway.storage.mirror.settings import RemoteRepository
from gateway.storage.remote.objects import FIRST, Patience, RemoteError, RemoteListing
from tests.gateway.storage.mirror.conftest import Open
from tests.remote_stores import MemoryStore

SOON_SECS = 30


def test_a_change_is_shown_after_two_equal_listings(store: MemoryStore, mirror_of: Open) -> None:
    mirror = mirror_of(store)
    before = mirror.files.snapshot("n")
    store.put("n/1/weights", b"new")
    mirror.poll()
    assert mirror.files.snapshot("n") == before
    mirror.poll()
    assert mirror.files.snapshot("n") != before
    assert store.lists == ["", "", ""]


def test_a_young_change_waits_for_the_clock_of_the_storage(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror = mirror_of(store)
    before = mirror.files.snapshot("n")
    store.put("n/1/weights", b"new", age_secs=0)
    for _ in range(3):
        mirror.poll()
        assert mirror.files.snapshot("n") == before
        assert mirror.is_settling
    store.at += timedelta(seconds=5)
    mirror.poll()
    assert mirror.files.snapshot("n") != before
    assert not mirror.is_settling


def test_an_upload_under_way_is_served_as_it_was_before(
    store: MemoryStore, mirror_of: Open
) -> None:
    before = mirror_of(store).files.snapshot("n")
    store.put("n/.uploading")
    store.put("n/2/weights", b"half")
    mirror = mirror_of(store)
    assert mirror.files.content("n") is None  # nothing of it was in the cache
    store.delete("n/.uploading")
    mirror.poll()
    mirror.poll()
    assert mirror.files.content("n") == ["1/", "2/", "config.pbtxt"]
    assert mirror.files.snapshot("n").items() > before.items()


def test_a_start_during_an_upload_serves_the_version_before(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror_of(store).folder("n").fetch()
    store.put("n/2/weights", b"half", age_secs=0)
    mirror = mirror_of(store)
    assert mirror.files.content("n") == ["1/", "config.pbtxt"]
    assert mirror.is_settling


def test_a_model_that_is_missing_is_dropped_after_two_listings(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror = mirror_of(store)
    store.delete("n")
    mirror.poll()
    assert mirror.files.content("n") is not None
    mirror.poll()
    assert mirror.files.content("") == ["m/"]


def test_a_repository_that_is_emptied_keeps_its_models(
    store: MemoryStore, mirror_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = mirror_of(store)
    mirror.folder("n").fetch()
    store.delete("m")
    store.delete("n")
    for _ in range(3):
        mirror.poll()
    assert mirror.files.content("") == ["m/", "n/"]
    assert "remote repository is empty, its models stay" in caplog.messages
    assert mirror_of(store).files.content("") == ["n/"]


def test_models_that_are_replaced_stay_until_the_new_ones_are_settled(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror = mirror_of(store)
    store.delete("m")
    store.delete("n")
    store.put("o/.uploading")
    store.put("o/1/weights", b"o")
    for _ in range(3):
        mirror.poll()
        assert mirror.files.content("") == ["m/", "n/"]
    store.delete("o/.uploading")
    mirror.poll()
    mirror.poll()
    assert mirror.files.content("") == ["o/"]


def test_objects_at_the_top_of_a_repository_of_models_unload_none(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror = mirror_of(store)
    for key in ("config.pbtxt", "1/model.py", "2/model.py"):
        store.put(key, b"by mistake")
        mirror.poll()
        assert mirror.files.content("m") is not None
        assert mirror.files.content("n") is not None
    mirror.poll()
    assert mirror.files.content("") == ["1/", "2/", "m/", "n/"]
    assert mirror.files.file("config.pbtxt") is None
    store.put("n/2/weights", b"new")
    mirror.refresh("n")
    assert store.lists[-1] == "n"
    assert mirror.files.content("n") == ["1/", "2/", "config.pbtxt"]


def test_a_start_with_a_young_object_at_the_top_serves_the_cache(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror_of(store).folder("n").fetch()
    store.put("config.pbtxt", b"by mistake", age_secs=0)
    assert mirror_of(store).files.content("") == ["n/"]


def test_keys_that_are_no_paths_are_ignored_with_one_warning_per_listing(
    store: MemoryStore, mirror_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("n/../x", "m//x", "m/1//weights"):
        store.put(key, b"by mistake")
    mirror = mirror_of(store)
    assert mirror.files.content("") == ["m/", "n/"]
    assert mirror.files.content("m") == ["1/", "2/", "config.pbtxt", "labels.txt"]
    (line,) = caplog.records
    assert line.message == "objects ignored, their keys are no paths of files"
    assert vars(line).items() >= {"first": "'m//x'", "count": 3}.items()
    mirror.poll()
    assert len(caplog.records) == 2


def test_a_failed_listing_changes_nothing(store: MemoryStore, mirror_of: Open) -> None:
    mirror = mirror_of(store)
    before = mirror.files.snapshot("n")
    store.down = True
    for _ in range(3):
        with pytest.raises(MirrorError, match="CannotConnect"):
            mirror.poll()
    assert mirror.files.snapshot("n") == before
    assert not mirror.up
    store.down = False
    mirror.poll()
    assert mirror.up


def test_a_start_without_the_storage_serves_what_is_whole(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror_of(store).folder("m").fetch(without=["1"])
    store.down = True
    mirror = mirror_of(store)
    assert mirror.files.content("") == ["m/"]
    assert mirror.files.content("m") == ["2/", "config.pbtxt", "labels.txt"]
    assert mirror.folder("m").fetch().path.is_dir()
    store.down = False
    mirror.poll()
    mirror.poll()
    assert mirror.files.content("") == ["m/", "n/"]


def test_a_start_waits_long_for_the_storage_only_if_the_cache_has_nothing(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror = mirror_of(store)
    assert store.patience is None
    mirror_of(store)  # the listing is saved, and no file
    assert store.patience is None
    mirror.folder("n").fetch()
    mirror_of(store)
    assert store.patience == FIRST
    mirror.poll()
    assert store.patience is None


def test_repositories_are_listed_at_once_at_the_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2)

    class Together(MemoryStore):
        """Answers once both are asked."""

        def list(self, under: str = "", patience: Patience | None = None) -> RemoteListing:
            together.wait(SOON_SECS)
            return super().list(under, patience)

    monkeypatch.setattr(opening, "open_store", lambda address, _: Together(address))
    addresses = ["s3://a", "s3://b"]
    remote = [RemoteRepository(address=each, root=root) for each in addresses]
    first, local, second = opening.open_places([remote[0], root, remote[1]], {})
    assert local == root
    assert [each.address for each in (first, second) if isinstance(each, Mirror)] == addresses


def test_a_start_without_storage_and_cache_fails(store: MemoryStore, mirror_of: Open) -> None:
    store.down = True
    with pytest.raises(MirrorError, match="cannot read 's3://bucket/models': CannotConnect"):
        mirror_of(store)


def overloaded(store: MemoryStore, times: int) -> None:
    """Have the next listings refused."""
    refusals = iter(range(times))

    def refuse() -> None:
        if next(refusals, None) is not None:
            raise RemoteError("SlowDown", "cannot list 's3://bucket/models': 503 SlowDown")

    store.before_list = refuse


def test_a_start_with_nothing_in_the_cache_waits_for_an_overloaded_storage(
    store: MemoryStore, mirror_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    overloaded(store, 20)
    mirror = mirror_of(store)
    assert mirror.files.content("") == ["m/", "n/"]
    assert caplog.messages == ["remote repository overloaded, listed again"] * 20
    assert (mirror.transfers.requests, mirror.up) == (21, True)


def test_a_start_with_models_in_the_cache_does_not_wait_for_an_overloaded_storage(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror_of(store).folder("n").fetch()
    store.lists.clear()
    overloaded(store, 1)
    mirror = mirror_of(store)
    assert mirror.files.content("") == ["n/"]
    assert store.lists == [""]


def test_an_overload_without_end_fails_a_start_with_nothing_in_the_cache(
    store: MemoryStore, mirror_of: Open
) -> None:
    now = [0.0]

    def refuse() -> None:
        now[0] += 50
        raise RemoteError("SlowDown", "cannot list 's3://bucket/models': 503 SlowDown")

    store.before_list = refuse
    with pytest.raises(MirrorError, match="503 SlowDown"):
        mirror_of(store, transfers=Transfers(clock=lambda: now[0], pause_secs=0))
    assert 180 < now[0] <= 300


@pytest.mark.parametrize(
    "addresses", [("s3://closed", "s3://busy"), ("s3://busy", "s3://closed")], ids=str
)
def test_a_repository_that_fails_ends_the_wait_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, str]
) -> None:
    waits = threading.Event()

    class Refusing(MemoryStore):
        def list(self, under: str = "", patience: Patience | None = None) -> RemoteListing:
            if self.origin == "s3://busy":
                waits.set()
                raise RemoteError("SlowDown", "cannot list 's3://busy': 503 SlowDown")
            assert waits.wait(SOON_SECS)
            raise RemoteError("AccessDenied", "cannot list 's3://closed': 403 AccessDenied")

    monkeypatch.setattr(opening, "open_store", lambda address, environment: Refusing(address))
    places = [RemoteRepository(address=address, root=tmp_path) for address in addresses]
    with pytest.raises(MirrorError, match="AccessDenied"):
        opening.open_places(places, {})


def test_an_offline_mirror_asks_nothing(store: MemoryStore, mirror_of: Open) -> None:
    mirror_of(store).folder("n").fetch()
    store.lists.clear()
    store.reads.clear()
    mirror = mirror_of(store, offline=True)
    mirror.poll()
    mirror.refresh("n")
    assert mirror.folder("n").fetch().path.is_dir()
    assert (store.lists, store.reads) == ([], [])


def test_an_offline_mirror_of_nothing_is_refused(store: MemoryStore, mirror_of: Open) -> None:
    with pytest.raises(MirrorError, match="'s3://bucket/models' is not in the cache"):
        mirror_of(store, offline=True)


def test_a_refresh_lists_one_model_and_shows_it_at_once(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror = mirror_of(store)
    store.put("n/2/weights", b"new", age_secs=0)
    store.put("o/1/weights", b"new", age_secs=0)
    mirror.refresh("n")
    assert mirror.files.content("n") == ["1/", "2/", "config.pbtxt"]
    mirror.refresh("o")
    assert mirror.files.content("") == ["m/", "n/", "o/"]
    assert store.lists == ["", "n", "o"]


def test_a_refresh_of_an_upload_under_way_is_refused(store: MemoryStore, mirror_of: Open) -> None:
    mirror = mirror_of(store)
    store.put("n/.uploading")
    store.put("n/2/weights", b"half")
    with pytest.raises(MirrorError, match="model 'n' is being uploaded"):
        mirror.refresh("n")
    assert mirror.files.content("n") == ["1/", "config.pbtxt"]


def test_a_refresh_without_the_storage_shows_the_model_as_it_was(
    store: MemoryStore, mirror_of: Open
) -> None:
    mirror = mirror_of(store)
    store.down = True
    mirror.refresh("n")
    assert mirror.files.content("n") == ["1/", "config.pbtxt"]
    with pytest.raises(MirrorError, match="CannotConnect"):
        mirror.refresh("unknown")
