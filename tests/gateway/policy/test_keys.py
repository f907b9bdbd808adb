"""API keys: their form, and their look-up by digest."""

import math
import re
import string
from hashlib import sha256
from zlib import crc32

import pytest

from gateway.policy.keys import ApiKey, KeyTable, Role, new_key

NOW = 1_000.0
KEY = re.compile(r"sk-sluice-(?P<id>[A-Z2-7]{8})-[\w-]{43}-(?P<check>[0-9A-Za-z]{6})", re.A)
DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def checked(key: str) -> bool:
    """Whether the last part of a key is the CRC-32 of the others, in base 62."""
    rest, _, check = key.rpartition("-")
    number = 0
    for each in check if KEY.fullmatch(key) else "":
        number = number * 62 + DIGITS.index(each)
    return number == crc32(rest.encode())


def table_of(key: str, **fields: object) -> KeyTable:
    found = KEY.fullmatch(key)
    assert found is not None
    stored = ApiKey(found["id"], sha256(key.encode()).digest(), "team", **fields)  # type: ignore[arg-type]
    return KeyTable([stored])


def test_a_new_key_has_its_form_and_is_found() -> None:
    key, key_id, digest = new_key()
    table = KeyTable([ApiKey(key_id, digest, "team")])
    found = table.find(key.encode(), NOW)
    assert found is not None
    assert (found.id, found.tenant, found.roles) == (key_id, "team", {Role.INFER})
    assert checked(key)


def test_new_keys_differ_in_id_and_secret() -> None:
    keys = [new_key()[0] for _ in range(100)]
    assert len({each.split("-")[2] for each in keys}) == 100
    assert len({each[19:] for each in keys}) == 100


@pytest.mark.parametrize("at", [9, 12, 20, 40, 62, 64, 68])
def test_the_check_of_a_mistyped_key_is_wrong_and_it_is_not_found(at: int) -> None:
    key = new_key()[0]
    typed = key[:at] + ("A" if key[at] != "A" else "B") + key[at + 1 :]
    assert not checked(typed)
    assert table_of(key).find(typed.encode(), NOW) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda key: "",
        lambda key: key[:-1],
        lambda key: key + key,
        lambda key: key + " ",
        lambda key: key.lower(),
        lambda key: key.replace("sk-", "pk-"),
        lambda key: new_key()[0],
        lambda key: key[:18] + new_key()[0][18:],
        lambda key: "\xe9" * len(key),
        lambda key: key[:18] * 1_000_000,
    ],
)
def test_other_texts_are_not_found(change: object) -> None:
    key = new_key()[0]
    given = change(key).encode("latin-1")  # type: ignore[operator]
    assert table_of(key).find(given, NOW) is None


def test_an_expired_key_is_not_found() -> None:
    key = new_key()[0]
    table = table_of(key, expires=NOW)
    assert table.find(key.encode(), math.nextafter(NOW, 0)) is not None
    assert table.find(key.encode(), NOW) is None


def test_a_digest_is_never_shown() -> None:
    _, key_id, digest = new_key()
    shown = repr(ApiKey(key_id, digest, "team"))
    assert key_id in shown
    assert repr(digest) not in shown
    assert digest.hex() not in shown
