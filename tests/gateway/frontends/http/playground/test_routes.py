"""The page at / and its files: bytes, media types and headers."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.dataplane import DataPlane
from gateway.frontends.http.app import build_app
from gateway.frontends.http.playground.routes import PlaygroundRoutes
from gateway.settings import HttpSettings, Settings
from tests.builders import LoadedModels, soon
from tests.serving import http_get, serving

PATHS = ["/", "/playground/state", "/playground/models", "/playground/main.js"]
FILES = {
    "style.css": "text/css; charset=utf-8",
    "main.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
REFERRED = re.compile(r'(?:src|href)="(playground/[^"]+)"')
IMPORTED = re.compile(r'from "\./([^"]+)"')
FROM_ELSEWHERE = re.compile(r"(?:src|href)=\"(?:[a-z]+:)?//|@import|url\(|from \"(?!\./)")
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(")


def connect(*, playground: bool = True) -> httpx.AsyncClient:
    dataplane = DataPlane(LoadedModels())  # type: ignore[arg-type]
    routes = PlaygroundRoutes(dataplane, Settings()) if playground else None
    app = build_app(dataplane, HttpSettings(), "triton", playground=routes)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with connect() as connected:
        yield connected


async def test_the_page_may_load_resources_of_this_server_only(
    client: httpx.AsyncClient,
) -> None:
    page = await soon(client.get("/"))
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].split("; ") == [
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", page.text)


async def test_everything_the_page_and_its_scripts_name_is_served_from_here(
    client: httpx.AsyncClient,
) -> None:
    page = (await soon(client.get("/"))).text
    wanted, seen = {path.removeprefix("playground/") for path in REFERRED.findall(page)}, {"": page}
    while wanted - seen.keys():
        name = (wanted - seen.keys()).pop()
        found = await soon(client.get(f"/playground/{name}"))
        assert found.status_code == 200, name
        seen[name] = found.text
        wanted |= set(IMPORTED.findall(found.text))
    assert {"main.js", "style.css", "plot.js", "markdown.js"} <= seen.keys()
    assert [name for name, text in seen.items() if FROM_ELSEWHERE.search(text)] == []
    assert [name for name, text in seen.items() if MARKUP.search(text)] == []


@pytest.mark.parametrize(("name", "media_type"), FILES.items())
async def test_a_file_has_its_media_type(
    client: httpx.AsyncClient, name: str, media_type: str
) -> None:
    found = await soon(client.get(f"/playground/{name}"))
    assert found.headers["content-type"] == media_type
    assert found.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/", "/playground/main.js"])
async def test_a_browser_that_has_a_file_is_not_sent_it_again(
    client: httpx.AsyncClient, path: str
) -> None:
    etag = (await soon(client.get(path))).headers["etag"]
    for known in (etag, f'"other", W/{etag}', "*"):
        again = await soon(client.get(path, headers={"If-None-Match": known}))
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    changed = await soon(client.get(path, headers={"If-None-Match": '"other"'}))
    assert changed.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/playground/absent.js",
        "/playground/..%2Froutes.py",
        "/playground/%2Fetc%2Fpasswd",
        "/playground/",
        "/playground",
    ],
)
async def test_no_other_name_is_served(client: httpx.AsyncClient, path: str) -> None:
    answer = await soon(client.get(path))
    assert (answer.status_code, answer.json()) == (404, {"error": "Not Found"})


@pytest.mark.parametrize("path", PATHS)
async def test_the_playground_is_only_read(client: httpx.AsyncClient, path: str) -> None:
    refused = await soon(client.post(path, content=b"{}"))
    assert (refused.status_code, refused.json()) == (405, {"error": "Method Not Allowed"})


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_playground_there_is_nothing(path: str) -> None:
    async with connect(playground=False) as client:
        answer = await soon(client.get(path))
    assert (answer.status_code, answer.json()) == (404, {"error": "Not Found"})


@pytest.mark.parametrize(("flag", "status"), [("true", 200), ("false", 404)])
def test_a_flag_decides_whether_a_server_has_a_playground(
    tmp_path: Path, flag: str, status: int
) -> None:
    with serving(tmp_path, f"--playground={flag}") as server:
        for path in PATHS:
            assert http_get(server.ports["http"], path)[0] == status
        assert http_get(server.ports["http"], "/v2")[0] == 200
