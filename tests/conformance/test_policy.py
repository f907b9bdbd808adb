"""Restricted areas: each route and each method needs the header of its area."""

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from gateway.policy.areas import GRPC, HTTP, RESTRICTABLE, Area
from tests.conformance.clients import tensor
from tests.conformance.keys import ECHO, message_of, status_of
from tests.conformance.spellings import answer_of, filled, spellings
from tests.raw import Connection, post
from tests.serving import Serving

OVER_HTTP = pytest.mark.runs_on("frontends")
OVER_GRPC = pytest.mark.runs_on("grpcio", "frontends")

FLAGS = (
    *(f"--http-restricted-api={each}:X-{each}=of {each}" for each in RESTRICTABLE),
    *(f"--grpc-restricted-protocol={each}:{each}-Key=of {each}" for each in RESTRICTABLE),
)
ROUTES = [(area, path) for area, paths in HTTP.items() for path in paths if area != Area.METRICS]
METHODS = [(area, path) for area, paths in GRPC.items() for path in paths]
INFERENCE = {"x-INFERENCE": "of inference"}


def headers(area: Area) -> dict[str, str]:
    return {f"X-{area}": f"of {area}"}


@pytest.mark.parametrize(("area", "path"), ROUTES)
@OVER_HTTP
def test_a_route_needs_the_header_of_its_area(http: httpx.Client, area: Area, path: str) -> None:
    others = {k: v for each in RESTRICTABLE if each is not area for k, v in headers(each).items()}
    wrong = {f"X-{area}": f"of {area}s"}
    for method in ("GET", "POST", "HEAD", "PUT"):
        for given in ({}, others, wrong):
            refused = http.request(method, filled(path), headers=given)
            if area not in RESTRICTABLE:
                assert refused.status_code != 403
                continue
            assert refused.status_code == 403, (method, given)
            if method != "HEAD":
                text = f"This API is restricted, expecting header 'X-{area}'"
                assert message_of(refused) == text
        allowed = answer_of(http, method, filled(path), headers(area))
        assert allowed.status_code != 403, method


@pytest.fixture(scope="module")
def channel(server: Serving) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as found:
        yield found


@pytest.mark.parametrize(("area", "path"), METHODS)
@OVER_GRPC
def test_a_method_needs_the_metadata_of_its_area(channel: Any, area: Area, path: str) -> None:
    name, text = f"triton-grpc-protocol-{area}-Key", "This protocol is restricted, expecting header"
    others = [
        (f"triton-grpc-protocol-{each}-key", f"of {each}") for each in RESTRICTABLE if each != area
    ]
    for given in ((), others, [(name.lower(), "wrong")], [(f"{area}-key", f"of {area}")]):
        assert status_of(channel, path, given) == ("UNAVAILABLE", f"{text} '{name}'")
    allowed = status_of(channel, path, [(name.lower(), f"of {area}")])
    assert text not in allowed[1]


SPELLINGS = spellings("/v2/models/single/infer")
OVERRIDES = (
    "Host: a/v2/health/live?x=",
    "X-Original-URL: /v2/models/single/infer",
    "X-Rewrite-URL: /v2/models/single/infer",
    "X-HTTP-Method-Override: GET",
    "X-Forwarded-Prefix: /v2/health",
)


@pytest.mark.parametrize("target", SPELLINGS.values(), ids=SPELLINGS)
@OVER_HTTP
def test_no_spelling_of_a_path_passes(server: Serving, target: str) -> None:
    with Connection(server.ports["http"]) as client:
        client.send(post(target, b"{}"))
        assert client.answer().status in (400, 403, 404, 405)


@pytest.mark.parametrize("header", OVERRIDES)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@OVER_HTTP
def test_no_header_changes_the_area(server: Serving, header: str, version: str) -> None:
    asked = post("/v2/models/single/infer", b"{}", header)
    if header.startswith("Host"):
        asked = asked.replace(b"Host: localhost\r\n", b"", 1)
    with Connection(server.ports["http"]) as client:
        client.send(asked.replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        assert client.answer().status == 403


@OVER_HTTP
def test_a_request_is_refused_before_its_body_is_read(server: Serving) -> None:
    with Connection(server.ports["http"]) as client:
        client.send(post("/v2/models/single/infer", b"x" * 100_000)[:-90_000])
        assert client.answer().status == 403


@pytest.mark.parametrize("given", [{}, INFERENCE])
@OVER_HTTP
def test_requests_with_and_without_the_header_share_a_connection(
    http: httpx.Client, given: Mapping[str, str]
) -> None:
    """The head of a request that is known from the last one needs the header, too."""
    for _ in range(3):
        answer = http.post("/v2/models/single/infer", json=ECHO, headers=given)
        assert answer.status_code == (200 if given else 403)
        assert http.post("/v2/models/single/infer", json=ECHO).status_code == 403


@OVER_GRPC
def test_tritons_clients_pass_with_their_headers(server: Serving) -> None:
    value = np.array(["hi"], np.object_)
    over_http = tritonclient.http.InferenceServerClient(server.http.removeprefix("http://"))
    over_grpc = tritonclient.grpc.InferenceServerClient(server.grpc)
    key = {"triton-grpc-protocol-inference-key": "of inference"}
    with over_http:
        asked = tritonclient.http.InferInput("INPUT", [1], "BYTES")
        asked.set_data_from_numpy(value)
        # The client adds headers to those that it is given.
        answer = over_http.infer("single", [asked], headers=dict(INFERENCE))
        assert answer.as_numpy("OUTPUT") == [b"hi"]
        with pytest.raises(InferenceServerException, match="This API is restricted"):
            over_http.infer("single", [asked])
    with over_grpc:
        asked = tensor("INPUT", "BYTES", value)
        assert over_grpc.infer("single", [asked], headers=key).as_numpy("OUTPUT") == [b"hi"]
        with pytest.raises(InferenceServerException, match="This protocol is restricted"):
            over_grpc.infer("single", [asked])


@OVER_HTTP
def test_the_metrics_are_not_restricted(server: Serving) -> None:
    assert server.metrics()


@OVER_HTTP
def test_no_value_is_in_the_log(server: Serving) -> None:
    assert "of inference" not in server.text
