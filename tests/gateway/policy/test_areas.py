"""The table of access has every route and method, each once, and all that change the server."""

from collections.abc import Sequence
from itertools import chain

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.dataplane import DataPlane
from gateway.frontends.grpc.guard import GrpcAccess
from gateway.frontends.grpc.rpc import Method
from gateway.frontends.grpc.server import GrpcServer
from gateway.frontends.http import app
from gateway.frontends.http.documentation import PAGES
from gateway.frontends.http.guard import GuardedRoute, HttpAccess
from gateway.frontends.http.playground.routes import PlaygroundRoutes
from gateway.metrics_page import MetricsPage
from gateway.policy.areas import (
    AREA_OF_METHOD,
    AREA_OF_METHOD_CHANGE,
    AREA_OF_ROUTE,
    AREA_OF_ROUTE_CHANGE,
    AREA_OF_SETTINGS,
    GRPC,
    GRPC_CHANGES,
    GRPC_SETTINGS,
    HTTP,
    HTTP_CHANGES,
    Area,
)
from gateway.policy.control import CHANGES
from gateway.policy.credentials import MAY_CHANGE, MAY_READ
from gateway.policy.keys import Role
from gateway.settings import GrpcSettings, HttpSettings, MetricsSettings, Settings
from tests.builders import LoadedModels
from tests.serving import ROOT

INFER = {"/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"}
"""The route in front of the application."""


def dataplane() -> DataPlane:
    return DataPlane(LoadedModels())  # type: ignore[arg-type]


READING = {
    *("generate", "generate_stream", "completions", "responses", "embeddings", "score", "rerank"),
    *("tokenize", "detokenize", "cancel", "index", "ping"),
}
"""The last parts of the paths whose POST leaves the server as it is."""
READING_METHODS = {
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig"),
    *("ModelInfer", "ModelStreamInfer", "ModelStatistics", "RepositoryIndex"),
    *("SystemSharedMemoryStatus", "CudaSharedMemoryStatus"),
    *("Check", "Watch", "ServerReflectionInfo", "List", "Get"),
}


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[Route | GuardedRoute]:
    """The routes of the application."""
    found: list[Starlette] = []

    class Kept(Starlette):
        def __init__(self, **options: object) -> None:
            super().__init__(**options)  # type: ignore[arg-type]
            found.append(self)

    monkeypatch.setattr(app, "Starlette", Kept)
    served = dataplane()
    app.build_app(served, HttpSettings(), "triton", PlaygroundRoutes(served, Settings()))
    return found[0].router.routes  # type: ignore[return-value]


async def test_the_routes_of_the_table_are_those_of_the_applications(
    routes: list[Route | GuardedRoute],
) -> None:
    page = app.build_metrics_app(MetricsPage(dataplane(), MetricsSettings())).router.routes
    assert {route.path for route in page} == set(HTTP[Area.METRICS])  # type: ignore[attr-defined]
    paths = {route.path for route in routes}
    assert paths | INFER | set(HTTP[Area.METRICS]) == set(AREA_OF_ROUTE)


async def test_a_route_changes_the_server_or_is_known_to_read(
    routes: list[Route | GuardedRoute],
) -> None:
    """A new route with a method other than GET is in the table of changes, or in READING."""
    more = [each for each in routes if each.methods is None or each.methods - {"GET", "HEAD"}]
    reading = {each.path for each in more if each.path.rpartition("/")[2] in READING}
    assert {each.path for each in more} - reading - set(PAGES) == set(AREA_OF_ROUTE_CHANGE)
    assert not reading & set(AREA_OF_ROUTE_CHANGE)


async def test_routes_that_take_posts_or_are_of_the_admin_have_a_condition_and_no_others(
    routes: list[Route | GuardedRoute],
) -> None:
    """A new route that takes the POST of a page has the conditions of pages, too.

    Those of the area admin are for this machine, without keys.
    """
    for each in routes:
        takes_posts = each.methods is None or "POST" in each.methods
        is_guarded = takes_posts or each.path in HTTP[Area.ADMIN]
        assert (type(each) is GuardedRoute) is is_guarded, each.path
    guarded = {each.path for each in routes if type(each) is GuardedRoute}
    assert guarded >= set(AREA_OF_ROUTE_CHANGE)


async def test_only_methods_that_change_the_server_have_a_condition() -> None:
    methods = {path: _method() for path in AREA_OF_METHOD}
    found = GrpcAccess().guarded(methods)
    changed = {path for path, method in found.items() if method is not methods[path]}
    assert changed == {*AREA_OF_METHOD_CHANGE, *AREA_OF_SETTINGS}


def _method() -> Method:
    return Method(serve=nothing, parse=bytes, serialize=bytes)  # type: ignore[arg-type]


def test_a_method_changes_the_server_or_is_known_to_read() -> None:
    changing = [path.rpartition("/")[2] for path in (*AREA_OF_METHOD_CHANGE, *AREA_OF_SETTINGS)]
    every = {path.rpartition("/")[2] for path in AREA_OF_METHOD}
    assert sorted(changing) == sorted(every - READING_METHODS)
    assert every >= READING_METHODS


@pytest.mark.parametrize(
    ("changes", "areas"),
    [
        (AREA_OF_ROUTE_CHANGE, AREA_OF_ROUTE),
        (AREA_OF_METHOD_CHANGE, AREA_OF_METHOD),
        (AREA_OF_SETTINGS, AREA_OF_METHOD),
    ],
)
def test_a_change_has_the_area_of_its_path(
    changes: dict[str, Area], areas: dict[str, Area]
) -> None:
    assert changes.items() <= areas.items()


def test_each_area_with_changes_has_a_text() -> None:
    assert set(CHANGES) == set(HTTP_CHANGES) == {*GRPC_CHANGES, *GRPC_SETTINGS}


async def test_the_methods_of_the_table_are_those_of_the_server() -> None:
    found: dict[str, Method] = {}

    def keep(methods: dict[str, Method], settings: GrpcSettings) -> object:
        found.update(methods)
        return type("Transport", (), {"port": 0})

    GrpcServer(dataplane(), GrpcSettings(port=0), "triton", create_transport=keep)  # type: ignore[arg-type]
    assert set(found) == set(AREA_OF_METHOD)


@pytest.mark.parametrize("table", [HTTP, GRPC])
def test_each_path_has_one_area(table: dict[Area, list[str]]) -> None:
    paths = list(chain.from_iterable(table.values()))
    assert len(paths) == len(set(paths))


async def nothing(request: Request) -> Response:
    return Response()


def test_a_route_or_a_method_without_an_area_is_refused_at_the_start() -> None:
    with pytest.raises(LookupError, match="the route '/new' has no area"):
        HttpAccess().guarded([Route("/new", nothing)])
    with pytest.raises(LookupError, match="the method '/new/Method' has no area"):
        GrpcAccess().guarded({"/new/Method": _method()})


@pytest.mark.parametrize("role", Role)
def test_the_page_has_the_rights_of_each_role(role: Role) -> None:
    page = (ROOT / "gateway" / "policy" / "README.md").read_text()
    reads = ", ".join(area for area in Area if role in MAY_READ.get(area, ()))
    changes = ", ".join(CHANGES) if role in MAY_CHANGE else "-"
    assert f"| {role} | {reads} | {changes} |\n" in page


@pytest.mark.parametrize("area", Area)
def test_the_page_has_the_table(area: Area) -> None:
    page = (ROOT / "gateway" / "policy" / "README.md").read_text()
    assert f"| {area} | {shown(HTTP.get(area))} | {shown(GRPC.get(area))} |\n" in page


def shown(paths: Sequence[str] | None) -> str:
    """The paths of an area, with a mark of those that change the server."""
    return ", ".join(f"`{path}`{mark(path)}" for path in paths or ()) or "-"


def mark(path: str) -> str:
    if path in AREA_OF_ROUTE_CHANGE:
        return " (POST changes)"
    if path in AREA_OF_SETTINGS:
        return " (settings change)"
    return " (changes)" if path in AREA_OF_METHOD_CHANGE else ""
