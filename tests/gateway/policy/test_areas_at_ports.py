"""Ports without changes: their applications and methods are the others' without the table's."""

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.dataplane import DataPlane
from gateway.frontends.grpc.guard import GrpcAccess
from gateway.frontends.grpc.server import GrpcServer
from gateway.frontends.http import app
from gateway.frontends.http.documentation import PAGES
from gateway.frontends.http.guard import HttpAccess
from gateway.frontends.http.playground.routes import PlaygroundRoutes
from gateway.policy.areas import (
    AREA_OF_METHOD_CHANGE,
    AREA_OF_ROUTE_CHANGE,
    GRPC,
    HTTP,
    Area,
)
from gateway.settings import GrpcSettings, HttpSettings, Settings
from tests.builders import LoadedModels

REFLECTION = {path for path in GRPC[Area.METADATA] if "Reflection" in path}


def dataplane() -> DataPlane:
    return DataPlane(LoadedModels())  # type: ignore[arg-type]


def routes_of(settings: HttpSettings, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """The path and each method of the routes of an application; "" is any method."""
    found: list[Starlette] = []

    class Kept(Starlette):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            found.append(self)

    monkeypatch.setattr(app, "Starlette", Kept)
    served = dataplane()
    app.build_app(served, settings, "triton", PlaygroundRoutes(served, Settings()))
    routes: list[Any] = found[0].router.routes
    return {(each.path, method) for each in routes for method in each.methods or {""}}


async def test_a_port_without_changes_lacks_exactly_those_routes_and_the_admins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = routes_of(HttpSettings(), monkeypatch)
    reading = routes_of(HttpSettings(changes=False), monkeypatch)
    changing = {(path, "POST") for path in AREA_OF_ROUTE_CHANGE}
    assert every - reading == changing | {(path, "GET") for path in HTTP[Area.ADMIN]}
    assert reading < every
    assert {(path, "GET") for path in (*HTTP[Area.TRACE], *HTTP[Area.LOGGING])} <= reading


async def test_a_port_without_documentation_lacks_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = routes_of(HttpSettings(), monkeypatch)
    found = routes_of(HttpSettings(documentation=False), monkeypatch)
    assert {path for path, _ in every - found} == set(PAGES)
    assert found < every


@pytest.mark.parametrize("changes", [True, False])
async def test_the_documentation_describes_the_routes_of_its_port(
    monkeypatch: pytest.MonkeyPatch, *, changes: bool
) -> None:
    found: set[str] = set()

    class Kept(app.Documentation):
        def __init__(self, tagged: Any, handlers: Any) -> None:
            super().__init__(tagged, handlers)
            described = [each for routes in tagged.values() for each in routes]
            found.update(each.path for each in described if "POST" in each.methods)

    monkeypatch.setattr(app, "Documentation", Kept)
    app.build_app(dataplane(), HttpSettings(changes=changes), "triton")
    assert "/v2/repository/index" in found
    assert found & set(AREA_OF_ROUTE_CHANGE) == (set(AREA_OF_ROUTE_CHANGE) if changes else set())


def methods_of(settings: GrpcSettings) -> set[str]:
    found: set[str] = set()

    def keep(methods: dict[str, Any], settings: GrpcSettings) -> Any:
        found.update(methods)
        return type("Transport", (), {"port": 0})

    GrpcServer(dataplane(), settings, "triton", create_transport=keep)
    return found


async def test_a_port_without_changes_lacks_exactly_the_methods_that_change() -> None:
    every = methods_of(GrpcSettings())
    assert every - methods_of(GrpcSettings(changes=False)) == set(AREA_OF_METHOD_CHANGE)
    assert every - methods_of(GrpcSettings(reflection=False)) == REFLECTION


async def nothing(request: Request) -> Response:
    return Response()


def test_a_route_without_an_area_is_refused_at_ports_without_changes_too() -> None:
    with pytest.raises(LookupError, match="the route '/new' has no area"):
        HttpAccess(changes=False).guarded([Route("/new", nothing, methods=["POST"])])
    with pytest.raises(LookupError, match="the method '/new/Method' has no area"):
        GrpcAccess(changes=False).guarded({"/new/Method": None})  # type: ignore[dict-item]
