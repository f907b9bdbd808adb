"""The body of a request that is one JSON object, for all routes but those that infer."""

from typing import Any

from starlette.requests import Request

from gateway.frontends.http.body import off_loop, read_body
from gateway.frontends.http.request_json import parse_json_object
from gateway.threads import LARGE_BYTES, Threads


async def read_object(request: Request, threads: Threads, limit: int) -> dict[str, Any]:
    """The object; a large one is parsed in a thread. InferenceError as `parse_json_object`."""
    body = await read_body(request, limit)
    if len(body) <= LARGE_BYTES:
        return parse_json_object(body)
    return await off_loop(threads, request.scope, parse_json_object, body)
