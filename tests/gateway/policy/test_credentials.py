"""Credentials: the key or the token of a request and its roles decide."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.policy.api_keys import ApiKeys
from gateway.policy.areas import Area
from gateway.policy.caller import Caller
from gateway.policy.control import CHANGES
from gateway.policy.credentials import (
    MAY_CHANGE,
    MAY_READ,
    MOST_WAIT_SECS,
    REFUSALS_AT_ONCE,
    REFUSALS_PER_SEC,
    Credentials,
    KeyRefusal,
    Reason,
)
from gateway.policy.key_file import KeyFileError, text_of_key
from gateway.policy.keys import ApiKey, Role, new_key
from gateway.policy.watched_file import ReloadFailures
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


def reason(credentials: Credentials, *given: tuple[bytes, bytes]) -> Reason | None:
    found = credentials.check(given, INFER)
    return found.reason if isinstance(found, KeyRefusal) else None


def test_a_key_of_the_file_with_the_role_is_allowed(file: Path) -> None:
    credentials = Credentials(ApiKeys(file))
    expected = Caller(tenant="team", key_id=KEY_ID, roles=INFER)
    assert credentials.check([BEARER], INFER) == expected
    text = f"the API key '{KEY_ID}' has the role infer, expected admin"
    refusal = KeyRefusal(Reason.FORBIDDEN, text, expected)
    assert credentials.check([BEARER], MAY_CHANGE) == refusal


def test_the_reason_of_a_refusal_is_that_of_the_first_fault(file: Path) -> None:
    credentials = Credentials(ApiKeys(file))
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
    credentials = Credentials(ApiKeys(file))
    for wire in ("http", "grpc", "http"):
        refusal = credentials.check([], INFER)
        assert isinstance(refusal, KeyRefusal)
        credentials.note(wire, refusal)
    assert credentials.refusals == {
        ("http", Reason.MISSING): 2,
        ("grpc", Reason.MISSING): 1,
    }


TOKEN = b"eyJhbGciOiJFUzI1NiJ9.eyJpc3MiOiJhIn0.c2lnbmF0dXJl"


class OneToken:
    """Tokens of which one is valid, with these roles."""

    def __init__(self, *roles: Role) -> None:
        self.caller = Caller(tenant="team", roles=frozenset(roles))
        self.failures = ReloadFailures("refused")
        self.given: list[bytes] = []

    def find(self, given: bytes, now: float) -> Caller | None:
        self.given.append(given)
        return self.caller if given == TOKEN else None

    async def follow(self, on_invalid: Callable[[], None]) -> None:
        on_invalid()


def header(name: str, credential: bytes) -> tuple[bytes, bytes]:
    """One of the headers, with a scheme if it is Authorization."""
    scheme = b"Bearer " if name == "authorization" else b""
    return name.encode(), scheme + credential


def test_a_token_is_one_in_authorization_only(file: Path) -> None:
    tokens = OneToken(Role.INFER)
    credentials = Credentials(ApiKeys(file), tokens)
    given = header("authorization", TOKEN)
    assert credentials.check([given], INFER) is tokens.caller
    assert credentials.check([given, header("x-api-key", TOKEN)], INFER) is tokens.caller
    for name in ("x-api-key", "api-key"):
        assert reason(credentials, header(name, TOKEN)) is Reason.WRONG
        assert reason(credentials, (b"authorization", b"Basic x"), header(name, TOKEN)) is (
            Reason.WRONG
        )
    assert tokens.given == [TOKEN, TOKEN]


@pytest.mark.parametrize(
    "other", [TOKEN[1:], TOKEN + b".", TOKEN.replace(b".", b"", 1), TOKEN.upper(), b"", b"eyJ"]
)
def test_another_form_is_that_of_a_key(file: Path, other: bytes) -> None:
    tokens = OneToken(Role.INFER)
    credentials = Credentials(ApiKeys(file), tokens)
    assert reason(credentials, header("authorization", other)) is Reason.WRONG
    assert reason(credentials, BEARER) is None
    assert tokens.given == []


def test_a_token_and_a_key_are_two_credentials(file: Path) -> None:
    credentials = Credentials(ApiKeys(file), OneToken(Role.INFER))
    both = [header("authorization", TOKEN), (b"x-api-key", KEY.encode())]
    assert credentials.check(both, INFER) == KeyRefusal(
        Reason.MALFORMED,
        "the request has two different API keys or tokens, expected 'Authorization: Bearer "
        "KEY_OR_TOKEN' or 'x-api-key: KEY'",
    )


def test_a_token_without_the_role_is_forbidden() -> None:
    given = header("authorization", TOKEN)
    texts = {Role.INFER: "has the role infer, expected admin", None: "has no role, expected admin"}
    for role, text in texts.items():
        tokens = OneToken(*filter(None, [role]))
        refusal = KeyRefusal(Reason.FORBIDDEN, f"the token {text}", tokens.caller)
        assert Credentials(None, tokens).check([given], MAY_CHANGE) == refusal


def test_the_texts_name_what_the_server_expects(file: Path) -> None:
    keys, tokens, wrong = ApiKeys(file), OneToken(), header("authorization", b"wrong")
    expected = {
        "API key": Credentials(keys),
        "token": Credentials(None, tokens),
        "API key or token": Credentials(keys, tokens),
    }
    for name, credentials in expected.items():
        assert credentials.check([wrong], INFER) == KeyRefusal(
            Reason.WRONG, f"the {name} is not valid"
        )
        missing = credentials.check([], INFER)
        assert isinstance(missing, KeyRefusal)
        assert missing.message.startswith(f"the {name} is missing, expected 'Authorization: ")


def test_failures_are_those_of_each_kind(file: Path) -> None:
    tokens = OneToken()
    tokens.failures.note(KeyFileError("gone"))
    assert Credentials(ApiKeys(file), tokens).reload_failures == {"keys": 0, "jwks": 1}
    assert Credentials(ApiKeys(file)).reload_failures == {"keys": 0}
    assert Credentials(None, tokens).reload_failures == {"jwks": 1}


async def test_keys_and_tokens_are_followed(file: Path) -> None:
    called = asyncio.Event()
    credentials = Credentials(ApiKeys(file), OneToken())
    following = asyncio.create_task(credentials.follow(called.set))
    await soon(called.wait())
    following.cancel()
    await asyncio.wait([following])
    assert following.cancelled()


def test_refusals_beyond_a_burst_are_answered_at_a_pace_and_at_most_a_second_later(
    file: Path,
) -> None:
    now, at_once = 1000.0, range(int(REFUSALS_AT_ONCE))
    credentials = Credentials(ApiKeys(file), clock=lambda: now)
    wrong = KeyRefusal(Reason.WRONG, "")
    assert max(credentials.note("http", wrong) for _ in at_once) < 1e-6
    assert credentials.note("grpc", wrong) == pytest.approx(1 / REFUSALS_PER_SEC)
    assert credentials.note("http", wrong) == pytest.approx(2 / REFUSALS_PER_SEC)
    assert credentials.note("http", wrong._replace(caller=Caller())) == 0
    waits = [credentials.note("http", wrong) for _ in range(2000)]
    assert max(waits) == waits[-1] == pytest.approx(MOST_WAIT_SECS)
    now += MOST_WAIT_SECS
    assert credentials.note("http", wrong) == pytest.approx(1 / REFUSALS_PER_SEC)
    now += 100
    assert max(credentials.note("http", wrong) for _ in at_once) < 1e-6
