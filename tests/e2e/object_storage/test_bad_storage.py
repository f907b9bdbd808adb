"""Storage that refuses, cuts, stalls or changes: the error says so, and other objects are read."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.storage.remote.addresses import parse_address
from gateway.storage.remote.clients import connect, open_store
from gateway.storage.remote.objects import (
    READ,
    Bytes,
    Connection,
    ObjectChanged,
    ObjectStore,
    Patience,
    RemoteError,
)
from tests.e2e.object_storage.clouds import HOST, KEYS, Bucket
from tests.e2e.object_storage.faulty_proxy import (
    LISTS,
    Answer,
    FaultyProxy,
    cut,
    lengthened,
    refused,
    shortened,
)
from tests.serving import WAIT_SECS, Serving

CONTENT = b"0123456789"
READERS = 8
SOON_SECS = 5
"""Far less than the storage has for an answer."""
SOON = Patience(retries=1, within_s=60)
IMPATIENT = Patience(retries=1, within_s=60, silence_s=0.3)


@pytest.fixture
def store(proxied_bucket: Bucket) -> ObjectStore:
    """A store behind the proxy, with two objects."""
    for key in ("broken", "neighbour"):
        proxied_bucket.put(f"r/m/{key}", CONTENT)
    return open_store(f"{proxied_bucket.address}/r", proxied_bucket.environment, SOON, SOON)


def read(store: ObjectStore, key: str) -> bytes:
    found = next(each for each in store.list().objects if each.key == f"m/{key}")
    return store.read(found, 0, found.size, b"".join)


def error_of(store: ObjectStore, key: str = "broken") -> RemoteError:
    """The error of a read; other objects are read all the same."""
    with pytest.raises(RemoteError) as raised:
        read(store, key)
    assert read(store, "neighbour") == CONTENT
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in str(raised.value)
    assert "?" not in str(raised.value)
    return raised.value


@pytest.mark.parametrize(
    ("status", "code", "fix"),
    [
        (403, "AccessDenied", "the right to list and read"),
        (403, "InvalidAccessKeyId", "check the key and its secret"),
        (403, "SignatureDoesNotMatch", "check the key and its secret"),
        (400, "ExpiredToken", "renew the session token"),
        (403, "RequestTimeTooSkewed", "set the clock of this machine"),
        (404, "NoSuchBucket", "create it, or correct the address"),
    ],
)
def test_a_refused_listing_has_tritons_words_and_status_code_message_and_fix(
    store: ObjectStore, proxy: FaultyProxy, status: int, code: str, fix: str
) -> None:
    proxy.break_next(refused(status, code), of=LISTS, times=2)
    with pytest.raises(RemoteError) as raised:
        store.list()
    assert raised.value.code == code
    assert str(raised.value).startswith(
        "Unable to create S3 filesystem client. Check account credentials. "
        f"cannot list '{store.origin}': {status} {code}: no, says {code}; "
    )
    assert fix in str(raised.value)


def test_a_refused_read_has_the_key_and_code(store: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.break_next(refused(403, "AccessDenied"), of="broken", times=2)
    assert f"cannot read '{store.origin}/m/broken': 403 AccessDenied" in str(error_of(store))


def test_a_wrong_key_of_azure_is_named(azure_bucket: Bucket) -> None:
    wrong = {**azure_bucket.environment, "AZURE_STORAGE_KEY": "d3Jvbmc="}
    with pytest.raises(RemoteError, match="Unable to create Azure filesystem client") as raised:
        open_store(azure_bucket.address, wrong, SOON).list()
    assert raised.value.code == "AuthorizationFailure"
    assert "d3Jvbmc=" not in str(raised.value)


def test_an_expired_token_is_renewed_from_the_credential_file(
    proxied_bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    proxied_bucket.put("m/x", CONTENT)
    path = tmp_path / "credentials.json"

    def write(key: str) -> None:
        credential = {"key_id": key, "secret_key": "s", "session_token": "t"}
        path.write_text(json.dumps({"s3": {"": credential}}))

    def expire(answer: Answer) -> None:
        write("new")
        refused(400, "ExpiredToken")(answer)

    write("old")
    store = open_store(proxied_bucket.address, {"TRITON_CLOUD_CREDENTIAL_PATH": str(path)}, SOON)
    proxy.break_next(expire, of=LISTS)
    assert [each.key for each in store.list().objects] == ["m/x"]
    signed = [each.split("/")[0].rpartition("=")[2] for each in proxy.signatures if each]
    assert signed == ["old", "new"]


def test_readers_that_are_refused_at_once_renew_credentials_once(
    proxied_bucket: Bucket, proxy: FaultyProxy
) -> None:
    proxied_bucket.put("m/x", CONTENT)
    made: list[Patience] = []
    address = parse_address(proxied_bucket.address)

    def counted(patience: Patience) -> Connection:
        made.append(patience)
        return connect(address, proxied_bucket.environment, patience)

    all_refused = threading.Barrier(READERS)

    def refuse(answer: Answer) -> None:
        all_refused.wait(timeout=60)
        refused(400, "ExpiredToken")(answer)

    store = ObjectStore(address, counted, SOON, READ)
    (found,) = store.list().objects
    proxy.break_next(refuse, of="m/x", times=READERS)
    with ThreadPoolExecutor(READERS) as threads:
        reads = threads.map(lambda _: store.read(found, 0, 10, b"".join), range(READERS))
        assert set(reads) == {CONTENT}
    assert made == [SOON, READ, READ]


def test_a_host_without_an_address_is_named() -> None:
    # A part of a name has at most 63 letters, so that no server of names is asked.
    store = open_store(f"s3://http://{'a' * 64}.example:9/b", KEYS, SOON)
    with pytest.raises(RemoteError, match="check the host in the address, and DNS") as raised:
        store.list()
    assert raised.value.code == "HostNotFound"


def test_a_storage_that_is_down_is_named(proxied_bucket: Bucket) -> None:
    # Nothing listens on the discard port.
    store = open_store(f"s3://{HOST}:9/b", KEYS, SOON)
    with pytest.raises(RemoteError, match="check that the storage runs") as raised:
        store.list()
    assert raised.value.code == "CannotConnect"


def test_an_answer_that_is_cut_is_continued(store: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.break_next(cut(5), of="broken")
    assert read(store, "broken") == CONTENT


def test_answers_that_are_always_cut_end_the_read(store: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.break_next(cut(0), of="broken", times=10)
    assert error_of(store).code == "Interrupted"


def test_a_rest_that_is_refused_after_a_cut_is_read_with_new_credentials(
    store: ObjectStore, proxy: FaultyProxy
) -> None:
    (found,) = (each for each in store.list().objects if each.key == "m/broken")
    proxy.break_next(cut(5), of="broken")
    proxy.break_next(refused(400, "ExpiredToken"), of="broken")
    taken: list[bytes] = []

    def take(chunks: Iterable[Bytes]) -> bytes:
        taken.append(b"".join(chunks))
        return taken[-1]

    assert store.read(found, 0, found.size, take) == CONTENT
    assert taken == [CONTENT]
    assert len([each for each in proxy.paths if "broken" in each and LISTS not in each]) == 3


def test_an_answer_of_another_length_is_no_content(store: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.break_next(shortened(3), of="broken", times=10)
    assert isinstance(error_of(store), ObjectChanged)


def test_bytes_behind_a_part_are_not_taken(store: ObjectStore, proxy: FaultyProxy) -> None:
    (found,) = (each for each in store.list().objects if each.key == "m/broken")
    proxy.break_next(lengthened(3), of="broken", times=10)
    taken: list[Bytes] = []
    with pytest.raises(ObjectChanged):
        store.read(found, 0, 5, taken.extend)
    assert len(b"".join(taken)) <= 5


def test_two_ranges_are_never_of_two_objects(
    store: ObjectStore, proxy: FaultyProxy, s3_bucket: Bucket
) -> None:
    found = next(each for each in store.list().objects if each.key == "m/broken")
    assert store.read(found, 0, 5, b"".join) == CONTENT[:5]
    s3_bucket.put("r/m/broken", CONTENT[::-1])
    with pytest.raises(ObjectChanged, match="412 PreconditionFailed"):
        store.read(found, 5, 5, b"".join)


def test_a_storage_that_asks_for_fewer_requests_gets_the_same_again(
    store: ObjectStore, proxy: FaultyProxy
) -> None:
    proxy.break_next(refused(503, "SlowDown"), of=LISTS)
    proxy.break_next(refused(503, "SlowDown"), of="broken")
    assert read(store, "broken") == CONTENT


def test_a_reader_learns_that_the_storage_asks_for_fewer_requests(
    store: ObjectStore, proxy: FaultyProxy
) -> None:
    proxy.break_next(refused(503, "SlowDown"), of="broken", times=SOON.retries + 1)
    error = error_of(store)
    assert error.code == "SlowDown"
    assert error.is_slow_down


def test_a_storage_that_stalls_ends_the_read(
    store: ObjectStore, proxied_bucket: Bucket, proxy: FaultyProxy
) -> None:
    proxy.break_next(proxy.stall, of="broken", times=10)
    found = next(each for each in store.list().objects if each.key == "m/broken")
    address, environment = proxied_bucket.address, proxied_bucket.environment
    impatient = open_store(f"{address}/r", environment, read=IMPATIENT)
    with pytest.raises(RemoteError, match="m/broken") as raised:
        impatient.read(found, 0, found.size, b"".join)
    assert raised.value.code == "Timeout"
    assert not raised.value.is_slow_down
    assert read(store, "neighbour") == CONTENT


@pytest.mark.own_models("the repository")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start_that_waits_for_a_storage(tmp_path: Path, number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"s3://http://127.0.0.1:{silent.getsockname()[1]}/bucket/models"
        environment = {**KEYS, "SLUICE_CACHE": str(tmp_path / "cache")}
        server = Serving(address, (), environment)
        silent.settimeout(WAIT_SECS)
        asked, _ = silent.accept()
        with asked:
            began = time.monotonic()
            assert server.stop(number) == -number
            assert time.monotonic() - began < SOON_SECS
    assert "Traceback" not in server.text
