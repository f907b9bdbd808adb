"""Credentials by certificates: the listed one decides, and a contradicting key is refused."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.policy import api_keys as api_keys_module
from gateway.policy.api_keys import ApiKeys
from gateway.policy.areas import Area
from gateway.policy.caller import Caller
from gateway.policy.credentials import MAY_CHANGE, MAY_READ, Credentials, KeyRefusal, Reason
from gateway.policy.key_file import text_of_key
from gateway.policy.keys import ApiKey, Role, new_key
from gateway.policy.watched_file import ReloadFailures
from tests.builders import soon

INFER = MAY_READ[Area.INFERENCE]
CALLER = Caller(tenant="web", key_id="URI:spiffe://prod/web", roles=INFER)
TOKEN = "eyJh.eyJi.c"
OWN, OTHER, ADMIN = new_key(), new_key(), new_key()
WEB, OLD = "URI:spiffe://prod/web", "CN:old"
FILE = f"""
[[certificates]]
san = "{WEB}"
tenant = "web"
[[certificates]]
san = "{OLD}"
tenant = "web"
expires = 2001-01-01T00:00:00Z
"""


def text_of(made: tuple[str, str, bytes], tenant: str, role: Role = Role.INFER) -> str:
    return text_of_key(ApiKey(made[1], made[2], tenant, frozenset({role})))


KEYS = text_of(OWN, "web") + text_of(OTHER, "other") + text_of(ADMIN, "web", Role.ADMIN)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "keys.toml"
    write(found, FILE + KEYS)
    return found


def write(file: Path, text: str) -> None:
    file.touch(0o600)
    file.write_text(text)


def header(key: str) -> tuple[bytes, bytes]:
    return (b"authorization", f"Bearer {key}".encode())


def test_a_listed_certificate_is_a_caller(file: Path) -> None:
    found = Credentials(ApiKeys(file)).check([], INFER, WEB)
    assert found == CALLER


def test_the_roles_of_a_certificate_decide(file: Path) -> None:
    assert Credentials(ApiKeys(file)).check([], MAY_CHANGE, WEB) == KeyRefusal(
        Reason.FORBIDDEN, f"the certificate '{WEB}' has the role infer, expected admin", CALLER
    )


@pytest.mark.parametrize(
    "key",
    [OWN[0], ADMIN[0], "none", new_key()[0]],
    ids=["of the tenant", "of an administrator", "none", "unknown"],
)
def test_a_listed_certificate_decides_and_not_the_key(file: Path, key: str) -> None:
    """OpenAI's client always sends a key, such as `none`."""
    credentials = Credentials(ApiKeys(file))
    found = credentials.check([header(key)], INFER, WEB)
    assert isinstance(found, Caller)
    assert found.key_id == WEB
    refused = credentials.check([header(key)], MAY_CHANGE, WEB)
    assert isinstance(refused, KeyRefusal)
    assert refused.reason is Reason.FORBIDDEN


def test_a_key_of_another_tenant_with_a_certificate_is_refused(file: Path) -> None:
    """Also one without the role."""
    for roles in (INFER, MAY_CHANGE):
        assert Credentials(ApiKeys(file)).check([header(OTHER[0])], roles, WEB) == KeyRefusal(
            Reason.MALFORMED,
            f"the certificate '{WEB}' and the API key '{OTHER[1]}' are of two tenants, expected "
            "one",
        )


class OneToken:
    """Tokens of which each is valid, for one tenant."""

    def __init__(self, tenant: str) -> None:
        self.caller = Caller(tenant=tenant, roles=INFER)
        self.failures = ReloadFailures("refused")

    def find(self, given: bytes, now: float) -> Caller | None:
        return self.caller

    async def follow(self, on_invalid: Callable[[], None]) -> None:
        on_invalid()


def test_a_token_of_another_tenant_with_a_certificate_is_refused(file: Path) -> None:
    keys = ApiKeys(file)
    assert Credentials(keys, OneToken("other")).check([header(TOKEN)], INFER, WEB) == KeyRefusal(
        Reason.MALFORMED,
        f"the certificate '{WEB}' and the token are of two tenants, expected one",
    )
    assert Credentials(keys, OneToken("web")).check([header(TOKEN)], INFER, WEB) == CALLER


def test_the_client_of_an_unlisted_certificate_may_have_a_token(file: Path) -> None:
    tokens = OneToken("other")
    credentials = Credentials(ApiKeys(file), tokens)
    assert credentials.check([header(TOKEN)], INFER, "CN:x") is tokens.caller
    missing = credentials.check([], INFER, "CN:x")
    assert isinstance(missing, KeyRefusal)
    assert missing.message.startswith(
        "the API key or token is missing and the certificate 'CN:x' is not listed, expected "
    )


def test_without_a_key_file_no_certificate_is_looked_at() -> None:
    tokens = OneToken("other")
    credentials = Credentials(None, tokens)
    assert credentials.check([header(TOKEN)], INFER, WEB) is tokens.caller
    assert credentials.check([], INFER, WEB) == credentials.check([], INFER)


def test_two_keys_are_refused_with_a_certificate_too(file: Path) -> None:
    given = [header(OWN[0]), (b"x-api-key", b"x")]
    found = Credentials(ApiKeys(file)).check(given, INFER, WEB)
    assert isinstance(found, KeyRefusal)
    assert found.reason is Reason.MALFORMED


@pytest.mark.parametrize("key", ["", OWN[0]], ids=["alone", "with a key"])
def test_an_expired_entry_is_refused_and_no_key_helps(file: Path, key: str) -> None:
    given = [header(key)] if key else []
    assert Credentials(ApiKeys(file)).check(given, INFER, OLD) == KeyRefusal(
        Reason.WRONG, f"the certificate '{OLD}' is no longer valid here"
    )


@pytest.mark.parametrize(
    ("certificate", "text"),
    [
        ("", "the API key is missing and the certificate has no URI, DNS name or CN, expected"),
        (
            "CN:x\u00e9\n",
            "the API key is missing and the certificate 'CN:x??' is not listed, expected",
        ),
        (None, "the API key is missing, expected"),
    ],
)
def test_the_client_of_an_unlisted_certificate_is_a_stranger(
    file: Path, certificate: str | None, text: str
) -> None:
    credentials = Credentials(ApiKeys(file))
    found = credentials.check([], INFER, certificate)
    assert isinstance(found, KeyRefusal)
    assert found.reason is Reason.MISSING
    assert found.message.startswith(text)
    by_key = credentials.check([header(OTHER[0])], INFER, certificate)
    assert isinstance(by_key, Caller)
    assert by_key.key_id == OTHER[1]
    wrong = credentials.check([header("x")], INFER, certificate)
    assert wrong == KeyRefusal(Reason.WRONG, "the API key is not valid")


async def test_the_caller_of_a_removed_certificate_is_no_longer_valid(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys_module, "LOOK_SECS", 0.005)
    keys, called = ApiKeys(file), asyncio.Event()
    credentials = Credentials(keys)
    assert keys.counts == {"keys": 3, "certificates": 2}
    certified = credentials.check([], INFER, WEB)
    by_key = credentials.check([header(OWN[0])], INFER)
    following = asyncio.create_task(credentials.follow(called.set))
    write(file, KEYS)
    await soon(called.wait())
    following.cancel()
    await asyncio.wait([following])
    assert isinstance(certified, Caller)
    assert isinstance(by_key, Caller)
    assert (certified.valid, by_key.valid) == (False, True)
