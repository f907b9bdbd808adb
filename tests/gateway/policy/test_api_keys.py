"""API keys of a file: the file is read again, and callers of revoked keys are no longer valid."""

import asyncio
import time
from pathlib import Path

import pytest

from gateway.policy import api_keys as api_keys_module
from gateway.policy.api_keys import ApiKeys
from gateway.policy.caller import Caller
from gateway.policy.key_file import KeyFileError, read_key_file, text_of_key
from gateway.policy.keys import ApiKey, Role, new_key
from gateway.policy.tenants import Tenants
from tests.builders import soon
from tests.following import followed, until

KEY, KEY_ID, DIGEST = new_key()
OTHER, OTHER_ID, OTHER_DIGEST = new_key()


def text_of(key_id: str, digest: bytes, *roles: Role) -> str:
    return text_of_key(ApiKey(key_id, digest, "team", frozenset(roles)))


BOTH = text_of(KEY_ID, DIGEST, Role.INFER) + "\n" + text_of(OTHER_ID, OTHER_DIGEST, Role.ADMIN)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "keys.toml"
    write(found, BOTH)
    return found


def write(file: Path, text: str) -> None:
    file.touch(0o600)
    file.write_text(text)


def remove(file: Path) -> None:
    file.unlink()


def permit(file: Path, mode: int) -> None:
    file.chmod(mode)


def lead(link: Path, file: Path) -> None:
    link.symlink_to(file)


def find(keys: ApiKeys, key: str = KEY) -> Caller | None:
    return keys.find(key.encode(), time.time())


def test_a_file_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError):
        ApiKeys(tmp_path / "absent")


def nothing() -> None:
    """The function that is called when callers are no longer valid."""


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is looked at more often than once a second."""
    monkeypatch.setattr(api_keys_module, "LOOK_SECS", 0.005)


@pytest.mark.usefixtures("often")
async def test_a_changed_file_is_read_again(file: Path) -> None:
    keys = ApiKeys(file)
    async with followed(keys.follow(nothing)):
        write(file, text_of(OTHER_ID, OTHER_DIGEST, Role.INFER))
        await soon(until(lambda: find(keys) is None))
        assert find(keys, OTHER) is not None
        permit(file, 0o644)
        await soon(until(lambda: keys.failures.count == 1))
        permit(file, 0o600)
        write(file, BOTH)
        await soon(until(lambda: find(keys) is not None))


@pytest.mark.usefixtures("often")
async def test_a_changed_file_changes_the_rules_of_tenants_and_a_wrong_one_does_not(
    file: Path,
) -> None:
    tenants = Tenants()
    keys = ApiKeys(file, tenants)
    assert not tenants.configured
    async with followed(keys.follow(nothing)):
        write(file, BOTH + "[tenants.search]\nweight = 3\n")
        await soon(until(lambda: tenants.rules("search").weight == 3.0))
        assert keys.counts["tenants"] == 1
        write(file, BOTH + "[tenants.search]\nweight = -3\n")
        await soon(until(lambda: keys.failures.count == 1))
        assert tenants.rules("search").weight == 3.0
        write(file, BOTH)
        await soon(until(lambda: not tenants.configured))


@pytest.mark.usefixtures("often")
async def test_a_file_that_cannot_be_used_leaves_the_keys_as_they_are(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(file)
    async with followed(keys.follow(nothing)):
        write(file, BOTH + "[[keys")
        await soon(until(lambda: keys.failures.count == 1))
        remove(file)
        await soon(until(lambda: keys.failures.count == 2))
        await asyncio.sleep(0.05)
    assert keys.failures.count == 2
    assert find(keys) is not None
    assert [vars(each)["reason"].partition(":")[0] for each in caplog.records] == [
        "it is no TOML",
        "it cannot be read",
    ]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("error", [KeyFileError("too many files", passes=True), RuntimeError("x")])
async def test_a_failure_that_passes_is_tried_again(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    keys, failing = ApiKeys(file), True

    def read(path: Path) -> str:
        if failing:
            raise error
        return read_key_file(path)

    monkeypatch.setattr(api_keys_module, "read_key_file", read)
    async with followed(keys.follow(nothing)):
        write(file, text_of(OTHER_ID, OTHER_DIGEST, Role.INFER))
        await soon(until(lambda: keys.failures.count == 1))
        await asyncio.sleep(0.05)
        assert keys.failures.count == 1
        assert find(keys) is not None
        failing = False
        await soon(until(lambda: find(keys) is None))


@pytest.mark.usefixtures("often")
async def test_a_link_to_another_file_is_followed(file: Path, tmp_path: Path) -> None:
    other, link = tmp_path / "other.toml", tmp_path / "link.toml"
    write(other, text_of(OTHER_ID, OTHER_DIGEST, Role.INFER))
    lead(link, file)
    keys = ApiKeys(link)
    async with followed(keys.follow(nothing)):
        assert find(keys) is not None
        remove(link)
        lead(link, other)
        await soon(until(lambda: find(keys) is None))
        assert find(keys, OTHER) is not None


def caller(keys: ApiKeys, key: str = KEY) -> Caller:
    found = find(keys, key)
    assert found is not None
    return found


@pytest.mark.usefixtures("often")
async def test_the_callers_of_revoked_and_changed_keys_are_no_longer_valid(file: Path) -> None:
    keys = ApiKeys(file)
    kept, revoked, called = caller(keys), caller(keys, OTHER), asyncio.Event()
    async with followed(keys.follow(called.set)):
        write(file, text_of(KEY_ID, DIGEST, Role.INFER))
        await soon(called.wait())
        assert (kept.valid, revoked.valid) == (True, False)
        called.clear()
        write(file, text_of(KEY_ID, DIGEST, Role.OBSERVE))
        await soon(called.wait())
        assert not kept.valid
        assert caller(keys).valid
        write(file, BOTH)
        await soon(until(lambda: find(keys, OTHER) is not None))
        assert not revoked.valid
        assert caller(keys, OTHER).valid


@pytest.mark.usefixtures("often")
async def test_the_caller_of_an_expired_key_is_no_longer_valid(file: Path) -> None:
    expires = time.time() + 0.2
    key = ApiKey(KEY_ID, DIGEST, "team", expires=expires)
    write(file, text_of_key(key).replace("Z\n", f".{int(expires % 1 * 1000):03}Z\n"))
    keys, called = ApiKeys(file), asyncio.Event()
    found = keys.find(KEY.encode(), expires - 0.1)
    assert found is not None
    async with followed(keys.follow(called.set)):
        await soon(called.wait())
    assert not found.valid
    assert time.time() >= int(expires * 1000) / 1000
    assert find(keys) is None
