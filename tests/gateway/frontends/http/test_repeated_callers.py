"""Inferences with the head of the last request: their caller is that of the last one."""

import asyncio
from collections.abc import Callable
from time import time
from typing import Any

from gateway.policy.caller import Caller
from gateway.policy.credentials import Credentials
from gateway.policy.keys import ListedCertificate, Role
from tests.certificates import Authority, Certificate
from tests.conftest import Serve
from tests.gateway.frontends.http.test_infer import BODY, ECHO, PATH, echo
from tests.gateway.frontends.http.test_infer_without_task import answer_of, app_of, served
from tests.gateway.frontends.http.test_listener_tls import certificates_of, session
from tests.gateway.frontends.http.test_listener_tls import served as served_over_tls
from tests.raw import post

REQUEST = post(PATH, BODY, "x-api-key: any")
INFER, OBSERVE = frozenset({Role.INFER}), frozenset({Role.OBSERVE})


class OneKey:
    """A source of one key; a caller that is replaced is no longer valid."""

    def __init__(self) -> None:
        self.caller: Caller | None = Caller(roles=INFER)
        self.listed: ListedCertificate | None = None

    def find(self, given: bytes, now: float) -> Caller | None:
        """See `CredentialSource`."""
        return self.caller

    def find_certificate(self, name: str) -> ListedCertificate | None:
        """See `KeySource`."""
        return self.listed

    def replace(self, caller: Caller | None) -> None:
        """Give the key another caller, or none."""
        if self.caller is not None:
            self.caller.valid = False
        self.caller = caller


async def statuses(serve: Serve, key: Any, *changes: Callable[[], object]) -> list[bytes]:
    """The status of two equal requests on a connection, and of two more after each change."""
    async with served(serve(echo(), config=ECHO), credentials=Credentials(key)) as server:
        return await statuses_on(await server.connect(), *changes)


async def statuses_on(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], *changes: Callable[[], object]
) -> list[bytes]:
    found, (reader, writer) = [], connection
    for change in (lambda: None, *changes):
        change()
        for _ in range(2):
            writer.write(REQUEST)
            found.append((await answer_of(reader)).split()[1])
    return found


async def test_each_is_refused_once_its_key_has_another_role(serve: Serve) -> None:
    key = OneKey()
    changes = [lambda: key.replace(Caller(roles=OBSERVE)), lambda: key.replace(Caller(roles=INFER))]
    found = await statuses(serve, key, *changes)
    assert found == [b"200", b"200", b"403", b"403", b"200", b"200"]


async def test_each_is_refused_once_its_key_is_removed(serve: Serve) -> None:
    key = OneKey()
    assert await statuses(serve, key, lambda: key.replace(None)) == [b"200", b"200", b"401", b"401"]


async def test_each_is_refused_from_the_second_on_at_which_its_key_expires(serve: Serve) -> None:
    """The key file is looked at later than that."""
    key = OneKey()
    expired = Caller(roles=INFER, expires=time() - 1)
    key.caller = Caller(roles=INFER, expires=time() + 60)

    def expire() -> None:
        assert key.caller is not None
        key.caller.expires = expired.expires
        key.caller = None

    assert await statuses(serve, key, expire) == [b"200", b"200", b"401", b"401"]


async def test_each_is_refused_once_the_certificate_of_its_client_is_listed_for_another_tenant(
    serve: Serve, authority: Authority, own: Certificate
) -> None:
    """The caller of its key is still valid, and never expires."""
    key: Any = OneKey()
    app = app_of(serve(echo(), config=ECHO), credentials=Credentials(key))
    client = authority.client(authority.issue("mine", "URI:spiffe://prod/a"))
    entry = ListedCertificate("URI:spiffe://prod/a", "b")
    certificates = certificates_of(own, authority.root)
    async with served_over_tls(certificates, app) as server, session(server, client) as connection:
        found = await statuses_on(connection, lambda: setattr(key, "listed", entry))
    assert found == [b"200", b"200", b"400", b"400"]
