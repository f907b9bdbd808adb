"""Conditions of routes: the address and the headers of a request decide, and in which order."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.frontends.http.guard import HttpAccess, HttpControl, HttpKeys, changes_server
from gateway.frontends.http.request_scope import CALLER, CERTIFICATE
from gateway.policy.api_keys import ApiKeys
from gateway.policy.areas import Area
from gateway.policy.caller import Caller
from gateway.policy.control import ChangeControl
from gateway.policy.credentials import MAY_READ, Credentials, Reason
from gateway.policy.key_file import text_of_key
from gateway.policy.keys import ApiKey, Role, new_key
from gateway.policy.restrictions import Restriction

LOGGING = "/v2/logging"
HOST = (b"host", b"localhost:8000")
CLOSED = ChangeControl()
INFER = MAY_READ[Area.INFERENCE]


def refusal(
    client: Any, *headers: tuple[bytes, bytes], control: ChangeControl = CLOSED
) -> str | None:
    condition, scope = HttpControl(control, Area.LOGGING), {"client": client, "headers": headers}
    refused = condition.refusal(scope)
    assert condition.allows(scope) is (refused is None)
    return None if refused is None else refused.detail


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_change_of_this_machine_is_answered(address: str) -> None:
    assert refusal((address, 40000), HOST) is None


@pytest.mark.parametrize("client", [("10.0.0.5", 40000), None])
def test_a_change_of_another_machine_or_of_an_unknown_client_is_refused(client: Any) -> None:
    """The address of a client that has reset its connection is unknown."""
    text = "changing log settings is answered to this machine only"
    assert (refusal(client, HOST) or "").startswith(text)
    assert refusal(client, HOST, control=ChangeControl(is_open=True)) is None


def test_headers_decide_too() -> None:
    client = ("127.0.0.1", 40000)
    assert refusal(client, (b"host", b"caf\xe9.example"))
    assert (
        refusal(
            client, (b"host", b"a.example"), control=ChangeControl(hosts=frozenset({"a.example"}))
        )
        is None
    )
    assert refusal(client, HOST, (b"via", b"1.1 a"))
    assert "found Origin 'null'" in (refusal(client, HOST, (b"origin", b"null")) or "")


def test_a_client_that_the_scope_lacks_is_unknown() -> None:
    assert not HttpControl(CLOSED, Area.TRACE).allows({"headers": []})


PAGE = [(b"host", b"evil.example:8000"), (b"origin", b"http://evil.example:8000")]
FOREIGN = [HOST, (b"origin", b"https://app.example")]


def of_page(headers: Any, method: str = "POST", **more: Any) -> int | None:
    """The status of the refusal of a page's request to this machine, None for none."""
    access = HttpAccess(**more)
    client, listener = ("127.0.0.1", 40000), ("127.0.0.1", 8000)
    scope = {"method": method, "client": client, "server": listener, "headers": headers}
    found = access.pages("application/json").refusal(scope)
    assert access.pages("application/json").allows(scope) is (found is None)
    return None if found is None else found.status_code


def test_the_post_of_a_page_of_another_origin_has_json() -> None:
    assert of_page(FOREIGN) == of_page([*FOREIGN, (b"content-type", b"text/plain")]) == 415
    assert of_page([*FOREIGN, (b"content-type", b"application/json")]) is None
    assert of_page([HOST, (b"origin", b"http://localhost:8000")]) is None


def test_the_post_of_a_page_that_bound_its_name_to_this_machine_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    known = ChangeControl(hosts=frozenset({"evil.example"}))
    assert of_page(PAGE) == of_page(PAGE, control=ChangeControl(is_open=True)) == 403
    assert of_page(PAGE, control=known) is None
    assert of_page(PAGE, credentials=Credentials(file)) is None


def test_requests_without_an_origin_and_those_that_get_have_no_condition() -> None:
    text = (b"content-type", b"text/plain")
    assert of_page([PAGE[0], text, (b"sec-fetch-site", b"cross-site")]) is None
    for method in ("GET", "HEAD", "OPTIONS"):
        assert of_page([*FOREIGN, text], method) is None
        assert of_page(PAGE, method) is None


def test_a_listener_that_the_scope_lacks_has_no_port() -> None:
    """As that of a Unix socket."""
    for server in (None, ("/run/sluice", None)):
        scope = {"method": "POST", "client": None, "server": server, "headers": PAGE}
        assert HttpAccess().pages("application/json").allows(scope)


async def changed(request: Request) -> Response:
    return Response()


@pytest.mark.parametrize(
    ("methods", "changes"), [(["POST"], True), (["PUT", "POST"], True), (["GET"], False)]
)
def test_the_method_of_a_route_decides_whether_it_changes(
    methods: list[str], changes: bool
) -> None:
    assert changes_server(Route(LOGGING, changed, methods=methods)) is changes
    assert not changes_server(Route("/v2/logs", changed, methods=methods))


def test_a_route_for_every_method_changes() -> None:
    route = Route(LOGGING, changed)
    route.methods = None
    assert changes_server(route)


@pytest.mark.parametrize(
    ("address", "headers", "status", "text"),
    [
        ("10.0.0.5", {}, 403, "This API is restricted, expecting header 'K'"),
        ("10.0.0.5", {"k": "v"}, 403, "changing log settings is answered to this machine only"),
        ("127.0.0.1", {}, 403, "This API is restricted, expecting header 'K'"),
        ("127.0.0.1", {"k": "v"}, 200, ""),
    ],
)
async def test_a_restricted_area_is_looked_at_first(
    address: str, headers: dict[str, str], status: int, text: str
) -> None:
    restrictions = {Area.LOGGING: Restriction.of("K", "v")}
    routes = HttpAccess(restrictions, CLOSED).guarded([Route(LOGGING, changed, methods=["POST"])])
    transport = httpx.ASGITransport(Starlette(routes=routes), client=(address, 40000))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(LOGGING, headers=headers)
    assert answer.status_code == status
    assert answer.text.startswith(text)


def test_a_restricted_route_that_reads_has_a_condition_and_a_free_one_none() -> None:
    route = Route(LOGGING, changed, methods=["GET"])
    restricted = HttpAccess({Area.LOGGING: Restriction.of("K", "v")})
    assert restricted.guarded([route]) != [route]
    assert HttpAccess().guarded([route]) == [route]


@pytest.mark.parametrize(
    ("role", "given", "status", "text"),
    [
        ("admin", {}, 403, "This API is restricted, expecting header 'K'"),
        ("admin", {"k": "v"}, 401, "the API key is missing"),
        ("observe", {"k": "v", "x-api-key": "KEY"}, 403, "the API key"),
        ("admin", {"k": "v", "x-api-key": "KEY"}, 200, ""),
        ("admin", {"k": "v", "x-api-key": "KEY", "origin": "null"}, 403, "changes are not"),
    ],
)
async def test_a_key_is_looked_at_after_the_restriction_and_instead_of_the_machine(
    tmp_path: Path, role: str, given: dict[str, str], status: int, text: str
) -> None:
    key, key_id, digest = new_key()
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(text_of_key(ApiKey(key_id, digest, "team", frozenset({Role(role)}))))
    access = HttpAccess(
        {Area.LOGGING: Restriction.of("K", "v")}, CLOSED, Credentials(ApiKeys(file))
    )
    app = Starlette(routes=access.guarded([Route(LOGGING, changed, methods=["POST"])]))
    transport = httpx.ASGITransport(app, client=("10.0.0.5", 40000))
    headers = {name: key if value == "KEY" else value for name, value in given.items()}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.post(LOGGING, headers=headers)
    assert answer.status_code == status
    assert answer.text.startswith(text)


def test_a_repeated_head_has_its_caller_until_that_ends() -> None:
    credentials = Credentials()
    condition, caller = HttpKeys(credentials, INFER), Caller(roles=INFER)
    scope: dict[str, Any] = {"headers": [HOST], "state": {CALLER: caller}}
    assert condition.allows(scope)
    caller.valid = False
    assert not condition.allows(scope)
    caller.valid = True
    scope["state"] = {CALLER: caller, CERTIFICATE: "client"}
    assert not condition.allows(scope)
    refused = condition.refusal(scope)
    assert refused is not None
    assert refused.status_code == 401
    assert credentials.refusals == {("http", Reason.MISSING): 1}
