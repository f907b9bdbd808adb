"""Paths of OpenAI's endpoints."""

import pytest

from gateway.frontends.http.openai.routes import is_openai, paths_of
from gateway.openai_contract import Endpoint


@pytest.mark.parametrize(
    ("endpoint", "paths"),
    [
        (Endpoint.CHAT, ["/v1/chat/completions", "/openai/v1/chat/completions"]),
        (Endpoint.SCORE, ["/v1/score", "/openai/v1/score", "/score"]),
        (Endpoint.RERANK, ["/v1/rerank", "/openai/v1/rerank", "/rerank"]),
        (Endpoint.TOKENIZE, ["/tokenize"]),
    ],
)
def test_an_endpoint_stands_where_openais_vllms_and_kserves_clients_look(
    endpoint: Endpoint, paths: list[str]
) -> None:
    assert list(paths_of(endpoint)) == paths


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_path_is_known_as_openais(endpoint: Endpoint) -> None:
    assert all(is_openai(path) for path in paths_of(endpoint))


@pytest.mark.parametrize("path", ["/v1/nope", "/openai/v1/models"])
def test_unknown_paths_below_the_prefix_are_openais(path: str) -> None:
    assert is_openai(path)


@pytest.mark.parametrize(
    "path", ["/", "/v2/models/v1/infer", "/v1", "/health", "/score/x", "/v10/"]
)
def test_other_paths_are_not(path: str) -> None:
    assert not is_openai(path)
