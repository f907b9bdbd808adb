"""Clients of Triton and of OpenAI, unchanged, with a repository in S3 and rollouts at work."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http

from gateway.cli import main
from tests.conformance.models import identity
from tests.conformance.openai_models import contract, piece, step
from tests.e2e.object_storage.clouds import MakeBucket
from tests.scripted import installed
from tests.serving import WAIT_SECS, Serving, serving, wait_until

pytestmark = pytest.mark.own_models("rollouts of the server")

PLAN = b"""{"steps": [{"weight": 50, "for": "1h"}, {"weight": 100, "for": "1h"}],
 "key": ["parameter:user", "openai:user"], "guardrails": {"errors": {}, "slow_first_response": {}}}
"""
POLL = ("--model-control-mode=poll", "--repository-poll-secs=1", "--repository-settle-secs=0")
WHOLE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "chat",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hi."}}
    ],
}
MODELS = {
    "m": identity("INT32", "1"),
    "whole": contract(step(WHOLE), {"final": True}),
    "streamed": contract(piece("Hi"), piece("."), piece(reason="stop"), {"final": True}),
}
USERS = [f"user-{number}" for number in range(12)]
MESSAGES: Any = [{"role": "user", "content": "Hello."}]


@pytest.fixture(scope="module")
def server(
    started: Callable[[str], MakeBucket], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A server whose models have a second version, which gets half of the users."""
    bucket, folder = started("s3")(), tmp_path_factory.mktemp("clients")
    for name, config in MODELS.items():
        bucket.put(f"models/{name}/config.pbtxt", config.encode())
        bucket.put(f"models/{name}/rollout.json", PLAN)
        bucket.put(f"models/{name}/1/weights", b"1")
    cache, backends = {"SLUICE_CACHE": str(folder / "cache")}, installed(folder / "installed")
    environment = {**bucket.environment, **cache, **backends}
    state = f"--state-directory={folder / 'state'}"
    with serving(f"{bucket.address}/models", *POLL, state, environment=environment) as running:
        for name in MODELS:
            bucket.put(f"models/{name}/2/weights", b"2")
        wait_until(lambda: states(running) == {"step"}, "every rollout is at its first step")
        yield running


def states(server: Serving) -> set[str]:
    rows = httpx.get(f"{server.http}/v2/rollouts", timeout=WAIT_SECS).json()
    return {row["state"] for row in rows} if len(rows) == len(MODELS) else set()


def promote(server: Serving, model: str) -> None:
    main(["rollout", "promote", model, f"--url={server.http}"])


def by_tritonclient(client: Any, wire: Any) -> list[str]:
    """The version that answers each user."""
    found = []
    for number, user in enumerate(USERS):
        tensor = wire.InferInput("INPUT", [1], "INT32")
        tensor.set_data_from_numpy(np.array([number], np.int32))
        result = client.infer("m", [tensor], parameters={"user": user})
        assert result.as_numpy("OUTPUT").tolist() == [number]
        response = result.get_response()
        is_json = isinstance(response, dict)
        found.append(response["model_version"] if is_json else response.model_version)
    return found


def test_tritonclient_gets_both_versions_on_each_wire_until_one_is_promoted(
    server: Serving,
) -> None:
    with (
        closing(tritonclient.http.InferenceServerClient(server.http.removeprefix("http://"))) as h,
        closing(tritonclient.grpc.InferenceServerClient(server.grpc)) as g,
    ):
        versions = by_tritonclient(h, tritonclient.http)
        assert set(versions) == {"1", "2"}
        assert by_tritonclient(g, tritonclient.grpc) == versions
        promote(server, "m")
        assert set(by_tritonclient(g, tritonclient.grpc)) == {"2"}


def ask_whole(client: openai.OpenAI, user: str) -> tuple[str, str]:
    """The text, and the version that made it."""
    raw = client.chat.completions.with_raw_response.create(
        model="whole", messages=MESSAGES, user=user
    )
    return str(raw.parse().choices[0].message.content), version_of(raw)


def ask_streamed(client: openai.OpenAI, user: str) -> tuple[str, str]:
    raw = client.chat.completions.with_raw_response.create(
        model="streamed", messages=MESSAGES, user=user, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in raw.parse()]
    return "".join(pieces), version_of(raw)


def version_of(raw: Any) -> str:
    return str(raw.headers.get("x-sluice-model-version", ""))


@pytest.mark.parametrize(("model", "ask"), [("whole", ask_whole), ("streamed", ask_streamed)])
def test_openais_client_gets_both_versions_until_one_is_promoted(
    server: Serving, model: str, ask: Callable[[openai.OpenAI, str], tuple[str, str]]
) -> None:
    address = f"{server.http}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        found = [ask(client, user) for user in USERS]
        assert {text for text, _ in found} == {"Hi."}
        assert {version for _, version in found} == {"1", "2"}
        assert [ask(client, user) for user in USERS] == found
        promote(server, model)
        assert {ask(client, user)[0] for user in USERS} == {"Hi."}
