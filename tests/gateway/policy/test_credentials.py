"""Credentials: the key of a request and its roles decide, and the file is read again."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.policy import credentials as credentials_module
from gateway.policy.areas import Area
from gateway.policy.caller import Caller
from gateway.policy.control import CHANGES
from gateway.policy.credentials import MAY_CHANGE, MAY_READ, Credentials, KeyRefusal, Reason
from gateway.policy.key_file import KeyFileError, read_key_file, text_of_key
from gateway.policy.keys import ApiKey, Role, new_key
from tests.builders import soon

KEY, KEY_ID, DIGEST = new_key()
OTHER, OTHER_ID, OTHER_DIGEST = new_key()
INFER = MAY_READ[Area.INFERENCE]
BEARER = (b"authorization", b"Bearer " + KEY.encode())


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


def reason(credentials: Credentials, *given: tuple[bytes, bytes]) -> Reason | None:
    found = credentials.check(given, INFER)
    return found.reason if isinstance(found, KeyRefusal) else None


def test_a_key_of_the_file_with_the_role_is_allowed(file: Path) -> None:
    credentials = Credentials(file)
    assert credentials.count == 2
    expected = Caller(tenant="team", key_id=KEY_ID, roles=INFER)
    assert credentials.check([BEARER], INFER) == expected
    assert credentials.check([BEARER], MAY_CHANGE) == KeyRefusal(
        Reason.FORBIDDEN, f"the API key '{KEY_ID}' has the role infer, expected admin"
    )


def test_the_reason_of_a_refusal_is_that_of_the_first_fault(file: Path) -> None:
    credentials = Credentials(file)
    key, other = (b"x-api-key", KEY.encode()), (b"api-key", OTHER.encode())
    assert reason(credentials) is Reason.MISSING
    assert reason(credentials, (b"authorization", b"Basic x")) is Reason.MISSING
    assert reason(credentials, (b"x-api-key", b"")) is Reason.WRONG
    assert reason(credentials, (b"x-api-key", b"x")) is Reason.WRONG
    assert reason(credentials, key, other) is Reason.MALFORMED
    assert reason(credentials, BEARER, BEARER) is Reason.MALFORMED
    assert reason(credentials, other) is Reason.FORBIDDEN
    basic = (b"authorization", b"Basic dTpw")
    assert reason(credentials, basic, key) is None
    assert reason(credentials, basic, BEARER) is Reason.MALFORMED
    assert reason(credentials, BEARER, key) is None


@pytest.mark.parametrize("area", Area)
def test_every_area_is_open_or_has_roles_that_may_read(area: Area) -> None:
    is_open = area in (Area.HEALTH, Area.PLAYGROUND)
    assert (area in MAY_READ) is not is_open
    if not is_open:
        assert MAY_READ[area]
    if area in CHANGES:
        assert MAY_READ[area] >= MAY_CHANGE


def test_refusals_are_counted_by_wire_and_reason(file: Path) -> None:
    credentials = Credentials(file)
    for wire in ("http", "grpc", "http"):
        refusal = credentials.check([], INFER)
        assert isinstance(refusal, KeyRefusal)
        credentials.note(wire, refusal)
    assert credentials.refusals == {
        ("http", Reason.MISSING): 2,
        ("grpc", Reason.MISSING): 1,
    }


def test_a_file_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError):
        Credentials(tmp_path / "absent")


def nothing() -> None:
    """The function that is called when callers are no longer valid."""


@asynccontextmanager
async def followed(
    credentials: Credentials, on_invalid: Callable[[], None] = nothing
) -> AsyncIterator[None]:
    following = asyncio.create_task(credentials.follow(on_invalid))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait([following])
        assert following.cancelled()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the file is looked at by the clock
        await asyncio.sleep(0.001)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is looked at more often than once a second."""
    monkeypatch.setattr(credentials_module, "LOOK_SECS", 0.005)


@pytest.mark.usefixtures("often")
async def test_a_changed_file_is_read_again(file: Path) -> None:
    credentials = Credentials(file)
    async with followed(credentials):
        write(file, text_of(OTHER_ID, OTHER_DIGEST, Role.INFER))
        await soon(until(lambda: reason(credentials, BEARER) is Reason.WRONG))
        assert reason(credentials, (b"api-key", OTHER.encode())) is None
        permit(file, 0o644)
        await soon(until(lambda: credentials.reload_failures == 1))
        permit(file, 0o600)
        write(file, BOTH)
        await soon(until(lambda: reason(credentials, BEARER) is None))


@pytest.mark.usefixtures("often")
async def test_a_file_that_cannot_be_used_leaves_the_keys_as_they_are(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = Credentials(file)
    async with followed(credentials):
        write(file, BOTH + "[[keys")
        await soon(until(lambda: credentials.reload_failures == 1))
        remove(file)
        await soon(until(lambda: credentials.reload_failures == 2))
        await asyncio.sleep(0.05)
    assert credentials.reload_failures == 2
    assert reason(credentials, BEARER) is None
    assert [vars(each)["reason"].partition(":")[0] for each in caplog.records] == [
        "it is no TOML",
        "it cannot be read",
    ]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("error", [KeyFileError("too many files", passes=True), RuntimeError("x")])
async def test_a_failure_that_passes_is_tried_again(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    credentials, failing = Credentials(file), True

    def read(path: Path) -> str:
        if failing:
            raise error
        return read_key_file(path)

    monkeypatch.setattr(credentials_module, "read_key_file", read)
    async with followed(credentials):
        write(file, text_of(OTHER_ID, OTHER_DIGEST, Role.INFER))
        await soon(until(lambda: credentials.reload_failures == 1))
        await asyncio.sleep(0.05)
        assert credentials.reload_failures == 1
        assert reason(credentials, BEARER) is None
        failing = False
        await soon(until(lambda: reason(credentials, BEARER) is Reason.WRONG))


@pytest.mark.usefixtures("often")
async def test_a_link_to_another_file_is_followed(file: Path, tmp_path: Path) -> None:
    other, link = tmp_path / "other.toml", tmp_path / "link.toml"
    write(other, text_of(OTHER_ID, OTHER_DIGEST, Role.INFER))
    lead(link, file)
    credentials = Credentials(link)
    async with followed(credentials):
        assert reason(credentials, BEARER) is None
        remove(link)
        lead(link, other)
        await soon(until(lambda: reason(credentials, BEARER) is Reason.WRONG))
        assert reason(credentials, (b"api-key", OTHER.encode())) is None


def caller(credentials: Credentials, key: str = KEY) -> Caller:
    found = credentials.check([(b"x-api-key", key.encode())], frozenset(Role))
    assert isinstance(found, Caller)
    return found


@pytest.mark.usefixtures("often")
async def test_the_callers_of_revoked_and_changed_keys_are_no_longer_valid(file: Path) -> None:
    credentials = Credentials(file)
    kept, revoked, called = caller(credentials), caller(credentials, OTHER), asyncio.Event()
    async with followed(credentials, called.set):
        write(file, text_of(KEY_ID, DIGEST, Role.INFER))
        await soon(called.wait())
        assert (kept.valid, revoked.valid) == (True, False)
        called.clear()
        write(file, text_of(KEY_ID, DIGEST, Role.OBSERVE))
        await soon(called.wait())
        assert not kept.valid
        assert caller(credentials).valid
        write(file, BOTH)
        await soon(until(lambda: reason(credentials, BEARER) is None))
        assert not revoked.valid
        assert caller(credentials, OTHER).valid


@pytest.mark.usefixtures("often")
async def test_the_caller_of_an_expired_key_is_no_longer_valid(file: Path) -> None:
    expires = time.time() + 0.2
    key = ApiKey(KEY_ID, DIGEST, "team", expires=expires)
    write(file, text_of_key(key).replace("Z\n", f".{int(expires % 1 * 1000):03}Z\n"))
    credentials, called = Credentials(file), asyncio.Event()
    found = caller(credentials)
    async with followed(credentials, called.set):
        await soon(called.wait())
    assert not found.valid
    assert time.time() >= int(expires * 1000) / 1000
    assert reason(credentials, BEARER) is Reason.WRONG
