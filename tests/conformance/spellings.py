"""Paths of routes, and spellings of them that may mislead a server."""

import re
from collections.abc import Mapping

import httpx


def filled(path: str) -> str:
    """A path of that route."""
    return re.sub(r"{[^}]*}", "x", path)


def spellings(path: str) -> Mapping[str, str]:
    """Request targets that may be taken for a path below `/v2/`, or for another one."""
    rest = path.removeprefix("/v2/")
    return {
        "a double slash": f"//v2/{rest}",
        "a slash behind": f"/v2/{rest}/",
        "capitals": f"/V2/{rest}",
        "dots": f"/v2/health/../{rest}",
        "escaped dots": f"/v2/health/%2e%2e/{rest}",
        "an escaped slash": f"/v2%2f{rest}",
        "a parameter": f"/v2/{rest};p",
        "a query": f"/v2/{rest}?x=/v2/health/live",
        "the absolute form": f"http://localhost/v2/{rest}",
        "the absolute form of another path": f"http://a/v2/health/live?@/v2/{rest}",
        "an authority": f"@localhost/v2/{rest}",
    }


def answer_of(
    http: httpx.Client, method: str, path: str, headers: Mapping[str, str]
) -> httpx.Response:
    """The answer to a request; of an endless stream of events only the head is read."""
    with http.stream(method, path, headers=headers) as answer:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            answer.read()
    return answer
