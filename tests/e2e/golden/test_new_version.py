"""A running server refuses a new version that fails its golden requests, as clients see it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.models import scripted
from tests.conformance.openai_models import contract, step
from tests.gateway.models.golden.files import CAPITAL, write_golden
from tests.scripted import installed
from tests.serving import Serving, series, serving, write_model

pytestmark = pytest.mark.own_models("loads and unloads")

CHAT: dict[str, Any] = {
    "request": {"chat": {"messages": [{"role": "user", "content": "Capital?"}], "max_tokens": 8}},
    "expect": {"text": {"contains": "Paris"}, "finish_reason": ["stop", "length"]},
}
FAILED = "failed to load '{}' version 1: golden request 'capital': {}"


def text_config(text: str) -> str:
    """A model that answers every text with this one."""
    return scripted({"text": text, "final": True})


def chat_config(text: str, reason: str = "stop") -> str:
    """A model that answers every chat with this text."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": reason}
    whole = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
    return contract(step({**whole, "choices": [choice]}), {"final": True})


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("repository")
    write_model(folder, "text", text_config("It is Paris."))
    write_golden(folder / "text", "capital", CAPITAL)
    write_model(folder, "chat", chat_config("Paris."))
    write_golden(folder / "chat", "capital", CHAT)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    environment = installed(tmp_path_factory.mktemp("installed"))
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with serving(repository, *flags, environment=environment) as running:
        yield running


def load(server: Serving, model: str) -> str:
    """Load a model; returns the error, if there is one."""
    answer = httpx.post(f"{server.http}/v2/repository/models/{model}/load")
    return "" if answer.status_code == 200 else answer.json()["error"]


def ask_text(server: Serving) -> str:
    answer = httpx.post(f"{server.http}/v2/models/text/generate", json={"text_input": "?"})
    return str(answer.json()["text_output"])


def ask_chat(server: Serving) -> str:
    body = {"model": "chat", "messages": [{"role": "user", "content": "?"}]}
    answer = httpx.post(f"{server.http}/v1/chat/completions", json=body)
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_text_model_that_fails_is_refused_and_the_loaded_one_serves_on(
    repository: Path, server: Serving
) -> None:
    config = repository / "text" / "config.pbtxt"
    config.write_text(text_config("It is Lyon."))
    error = load(server, "text")
    assert FAILED.format("text", "text does not match '(?i)paris': 'It is Lyon.'") in error
    assert ask_text(server) == "It is Paris."
    config.write_text(text_config("PARIS, as ever."))
    assert load(server, "text") == ""
    statistics = httpx.get(f"{server.http}/v2/models/text/stats").json()["model_stats"][0]
    assert statistics["inference_stats"]["success"]["count"] == 0
    assert ask_text(server) == "PARIS, as ever."
    page = httpx.get(f"http://127.0.0.1:{server.ports['metrics']}/metrics").text
    assert f"{series('gateway_golden_requests', 'text', outcome='passed')} 1" in page


@pytest.mark.parametrize(
    ("text", "reason", "problem"),
    [
        ("Lyon.", "stop", "text does not contain 'Paris': 'Lyon.'"),
        ("Paris.", "tool_calls", "finish reason is 'tool_calls', expected 'stop' or 'length'"),
    ],
)
def test_a_chat_model_that_fails_is_refused_and_the_loaded_one_serves_on(
    repository: Path, server: Serving, text: str, reason: str, problem: str
) -> None:
    (repository / "chat" / "config.pbtxt").write_text(chat_config(text, reason))
    assert FAILED.format("chat", problem) in load(server, "chat")
    assert ask_chat(server) == "Paris."
