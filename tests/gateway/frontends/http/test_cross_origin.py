"""Responses for pages of other origins: their headers, preflights, and no cost for programs."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.frontends.http.cross_origin import CrossOriginApp
from gateway.frontends.http.request_scope import SEND_WHOLE, TracedApp
from gateway.settings import HttpSettings
from tests.builders import TEXT, ScriptedInstance, settle, soon, text_response
from tests.conftest import Serve
from tests.exchange import Exchange
from tests.gateway.frontends.http.apps import SETTINGS, app_of
from tests.gateway.frontends.http.test_infer import BODY, ECHO, PATH, echo
from tests.gateway.frontends.http.test_infer_without_task import Begun

APP = "https://app.example"
SHARED = replace(SETTINGS, cors_origins=frozenset({APP, "https://other.example"}))
OF_ALL = replace(SETTINGS, cors_origins=frozenset({"*"}))
EXPOSED = (
    "X-Request-Id, Retry-After, inference-header-content-length, Sluice-Stream, "
    "Idempotency-Replayed, Retry-After-Ms, X-Should-Retry, X-Refused-Reason, X-Predicted-Wait-Ms, "
    "x-ratelimit-limit-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, "
    "x-ratelimit-remaining-tokens, x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
STREAM = "/v2/models/text/generate_stream"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def answered(
    app: ASGIApp,
    origin: str | None,
    path: str = PATH,
    method: str = "POST",
    more: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, str]]:
    """The status and the headers of an exchange."""
    headers = {**({} if origin is None else {"origin": origin}), **(more or {})}
    async with Exchange(app, path, BODY, headers, method) as exchange:
        found = await exchange.start()
        await exchange.rest()
    return found


def of_cors(headers: Mapping[str, str]) -> dict[str, str]:
    names = ("access-control-", "vary")
    return {name: value for name, value in headers.items() if name.startswith(names)}


async def test_a_page_of_a_named_origin_may_read_each_response(serve: Serve) -> None:
    app = app_of(serve(echo(), config=ECHO), settings=SHARED)
    paths = {PATH: 200, "/v2/models/no/infer": 404, "/v1/completions": 400, "/nothing": 404}
    for path, status in paths.items():
        found, headers = await answered(app, APP, path)
        assert found == status, path
        assert of_cors(headers) == {
            "access-control-allow-origin": APP,
            "access-control-expose-headers": EXPOSED,
            "vary": "Origin",
        }


@pytest.mark.parametrize(
    "origin",
    [
        *("https://app.example.evil.example", "https://app.example:8443", "http://app.example"),
        *("HTTPS://APP.EXAMPLE", "https://app.example/", "null", "", "*", f"{APP}, {APP}"),
        "https://" + "a" * 60_000,
    ],
)
async def test_another_page_may_read_none(serve: Serve, origin: str) -> None:
    app = app_of(serve(echo(), config=ECHO), settings=SHARED)
    status, headers = await answered(app, origin)
    assert status == 200
    assert "access-control-allow-origin" not in headers
    status, headers = await answered(app, origin, method="OPTIONS", more=PREFLIGHT)
    assert status == 400
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("settings", [SHARED, OF_ALL])
async def test_the_response_to_a_program_is_that_of_a_server_without_the_option(
    serve: Serve, settings: HttpSettings
) -> None:
    model = serve(echo(), config=ECHO)
    for path in (PATH, "/v2/models/no/infer"):
        expected = await answered(app_of(model), None, path)
        assert await answered(app_of(model, settings=settings), None, path) == expected


@pytest.mark.parametrize("origin", [APP, "null", "file://", "https://anywhere.example"])
async def test_with_a_star_every_page_may_read(serve: Serve, origin: str) -> None:
    app = app_of(serve(echo(), config=ECHO), settings=OF_ALL)
    assert (await answered(app, origin))[1]["access-control-allow-origin"] == "*"
    status, headers = await answered(app, origin, method="OPTIONS", more=PREFLIGHT)
    assert (status, headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/nothing", "/v2/logging"])
async def test_a_preflight_of_every_path_is_answered(path: str) -> None:
    status, headers = await answered(app_of(settings=SHARED), APP, path, "OPTIONS", PREFLIGHT)
    assert status == 200
    assert headers["access-control-allow-origin"] == APP
    assert headers["access-control-allow-methods"] == "GET, HEAD, POST"
    allowed = headers["access-control-allow-headers"]
    assert allowed == PREFLIGHT["access-control-request-headers"]
    assert "access-control-allow-credentials" not in headers


async def test_a_preflight_for_a_private_network_is_answered() -> None:
    """Browsers may ask before a page of the internet reaches an address of a private network."""
    more = {**PREFLIGHT, "access-control-request-private-network": "true"}
    status, headers = await answered(app_of(settings=SHARED), APP, PATH, "OPTIONS", more)
    assert (status, headers["access-control-allow-private-network"]) == (200, "true")


async def test_other_requests_with_the_method_options_have_their_route() -> None:
    app = app_of(settings=SHARED)
    assert (await answered(app, APP, method="OPTIONS"))[0] == 405
    assert (await answered(app, None, method="OPTIONS", more=PREFLIGHT))[0] == 405
    delete = {**PREFLIGHT, "access-control-request-method": "DELETE"}
    assert (await answered(app, APP, method="OPTIONS", more=delete))[0] == 400


async def test_without_the_option_there_is_no_cors(serve: Serve) -> None:
    app = app_of(serve(echo(), config=ECHO))
    assert of_cors((await answered(app, APP))[1]) == {}
    assert (await answered(app, APP, method="OPTIONS", more=PREFLIGHT))[0] == 405


async def test_events_reach_a_page_as_they_come_and_its_disconnect_stops_the_model(
    serve: Serve,
) -> None:
    instance = ScriptedInstance()
    app = app_of(serve(instance, config=TEXT), settings=SHARED)
    asked = b'{"text_input": "hi"}'
    async with Exchange(app, STREAM, asked, {"origin": APP}) as exchange:
        execution = await instance.begun()
        execution.answer(text_response("one"))
        status, headers = await exchange.start()
        assert (status, headers["access-control-allow-origin"]) == (200, APP)
        assert headers["content-type"].startswith("text/event-stream")
        assert b"one" in await exchange.chunk()
        execution.answer(text_response("two"))
        assert b"two" in await exchange.chunk()
        exchange.leave()
        await soon(execution.stopped.wait())


@pytest.mark.parametrize("settings", [SETTINGS, SHARED])
async def test_a_program_is_answered_without_a_task_and_a_page_with_one(
    serve: Serve, settings: HttpSettings
) -> None:
    app = app_of(serve(echo(), config=ECHO), settings=settings)
    assert isinstance(app, TracedApp)
    begun = Begun(app)
    assert begun.is_begun
    await settle()
    assert begun.connection.answered
    assert not Begun(app, BODY, (b"origin", APP.encode())).is_begun


class Trimmed:
    """An application that drops the headers of a request before it answers, as streams do."""

    def begin(self, *_: object) -> bool:
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"].clear()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})


async def test_a_response_is_for_the_page_of_its_request() -> None:
    app = CrossOriginApp(Trimmed(), [APP])
    assert (await answered(app, APP))[1]["access-control-allow-origin"] == APP


async def test_a_whole_response_to_a_page_passes_the_middleware(serve: Serve) -> None:
    """The connection's own way of sending one would leave its headers out."""

    async def send_whole(*_: object) -> None:
        raise AssertionError("the response has no header for the page")

    app = app_of(serve(echo(), config=ECHO), settings=SHARED)

    async def connected(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][SEND_WHOLE] = send_whole
        await app(scope, receive, send)

    assert (await answered(connected, APP))[1]["access-control-allow-origin"] == APP
