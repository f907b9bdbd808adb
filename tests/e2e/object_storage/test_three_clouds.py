"""Objects of three clouds, listed and read."""

from datetime import UTC, datetime, timedelta

import pytest

from gateway.storage.remote.clients import open_store
from gateway.storage.remote.objects import (
    ObjectChanged,
    ObjectStore,
    Patience,
    RemoteError,
    RemoteListing,
)
from tests.e2e.object_storage.clouds import Bucket


def store_of(bucket: Bucket, folder: str = "repository") -> ObjectStore:
    return open_store(f"{bucket.address}/{folder}", bucket.environment)


def keys_of(listing: RemoteListing) -> list[str]:
    return [each.key for each in listing.objects]


def test_a_listing_has_every_object_below_the_prefix_with_its_size_and_time(
    cloud_bucket: Bucket,
) -> None:
    cloud_bucket.put("repository/m/config.pbtxt", b"name")
    cloud_bucket.put("repository/m/1/model.bin", b"0123456789")
    cloud_bucket.put("repository-2/m/config.pbtxt", b"of another prefix")
    store = store_of(cloud_bucket)
    listing = store.list()
    assert [(each.key, each.size) for each in listing.objects] == [
        ("m/1/model.bin", 10),
        ("m/config.pbtxt", 4),
    ]
    assert keys_of(store.list("m/1")) == ["m/1/model.bin"]
    assert keys_of(store.list("none")) == []
    for each in listing.objects:
        assert each.etag
        assert '"' not in each.etag
        modified = datetime.fromtimestamp(each.modified_ns / 1e9, UTC)
        assert abs(datetime.now(UTC) - modified) < timedelta(minutes=1)
    assert listing.at is not None
    assert abs(datetime.now(UTC) - listing.at) < timedelta(minutes=1)


@pytest.mark.parametrize("key", ["a b.bin", "a+b=c.bin", "ü/100%25.bin", "~[x]&'.bin"])
def test_a_key_may_have_any_character(cloud_bucket: Bucket, key: str) -> None:
    cloud_bucket.put(f"repository/m/{key}", key.encode())
    store = store_of(cloud_bucket)
    (found,) = store.list().objects
    assert found.key == f"m/{key}"
    assert store.read(found, 0, found.size, b"".join) == key.encode()


def test_a_prefix_may_have_blanks_and_signs(cloud_bucket: Bucket) -> None:
    cloud_bucket.put("team a+b=c/m/x", b"1")
    store = store_of(cloud_bucket, "//team a+b=c//")
    assert keys_of(store.list()) == ["m/x"]


def test_an_empty_object_is_a_file_and_a_folder_marker_is_a_folder(cloud_bucket: Bucket) -> None:
    for key in ("", "m/", "m/1/", "ensemble/", "ensemble/1/"):
        cloud_bucket.put(f"repository/{key}", b"")
    cloud_bucket.put("repository/m/1/empty.txt", b"")
    listing = store_of(cloud_bucket).list()
    assert keys_of(listing) == ["m/1/empty.txt"]
    assert listing.folders == ("ensemble", "ensemble/1", "m", "m/1")
    assert store_of(cloud_bucket).read(listing.objects[0], 0, 0, b"".join) == b""


def test_a_part_of_an_object_is_read(cloud_bucket: Bucket) -> None:
    cloud_bucket.put("repository/m/x", b"0123456789")
    store = store_of(cloud_bucket)
    (found,) = store.list().objects
    assert store.read(found, 3, 4, b"".join) == b"3456"


def test_an_object_that_was_exchanged_or_deleted_is_not_read(cloud_bucket: Bucket) -> None:
    cloud_bucket.put("repository/m/x", b"0123456789")
    store = store_of(cloud_bucket)
    (found,) = store.list().objects
    cloud_bucket.put("repository/m/x", b"9876543210")
    with pytest.raises(ObjectChanged, match="m/x"):
        store.read(found, 0, 10, b"".join)
    cloud_bucket.delete("repository/m/x")
    with pytest.raises(ObjectChanged, match="m/x"):
        store.read(found, 0, 10, b"".join)


def test_a_missing_bucket_is_no_empty_listing(cloud_bucket: Bucket) -> None:
    patience = Patience(retries=0, within_s=5)
    store = open_store(f"{cloud_bucket.address}-missing", cloud_bucket.environment, patience)
    with pytest.raises(RemoteError, match="-missing") as raised:
        store.list()
    # This emulator of Google answers with 500 where Google has NoSuchBucket.
    assert raised.value.code in ("NoSuchBucket", "ContainerNotFound", "500")


def test_a_key_that_is_no_path_of_a_file_is_named(s3_bucket: Bucket) -> None:
    s3_bucket.put("repository/m//x", b"")
    with pytest.raises(RemoteError, match=r'"repository/m//x".*rename or delete'):
        store_of(s3_bucket).list()
