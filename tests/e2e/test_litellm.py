"""litellm, which speaks OpenAI's API and Triton's, and the real engine."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.e2e.llama import ANSWER, QUESTION
from tests.serving import ROOT, Serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

PROGRAM = Path(__file__).with_name("litellm") / "ask.py"
ENVIRONMENT = ROOT / ".venv" / "litellm"
LIMIT_SECS = 120
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""It would ask the network for what models cost."""

BEGINNING = "The capital of France is"

Answers = Mapping[str, Any]


@pytest.fixture(scope="module")
def answers(server: Serving) -> Answers:
    """The answers that litellm got, in each of its ways; without it the tests are skipped."""
    if not (ENVIRONMENT / "ready").exists():
        needs.lacking("litellm", "run `make litellm`")
    program = [str(ENVIRONMENT / "bin" / "python"), str(PROGRAM)]
    asked = [*program, server.http, "llama", json.dumps(QUESTION), BEGINNING]
    done = subprocess.run(
        asked, env={**os.environ, **OFFLINE}, capture_output=True, text=True, timeout=LIMIT_SECS
    )
    assert done.returncode == 0, done.stderr
    found: Answers = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_answer_comes_whole_and_streamed_with_its_usage(answers: Answers) -> None:
    whole, streamed = answers["whole"], answers["streamed"]
    assert whole["text"] == streamed["text"] == ANSWER
    assert whole["reason"] == streamed["reason"] == "stop"
    assert whole["tokens"] == streamed["tokens"]
    assert streamed["chunks"] >= whole["tokens"]


def test_a_text_is_completed(answers: Answers) -> None:
    assert answers["completed"].startswith(" Paris")


def test_an_unknown_model_is_litellms_error(answers: Answers) -> None:
    assert answers["refused"]["kind"] == "NotFoundError"
    assert answers["refused"]["status"] == 404
    assert "The model `nowhere` does not exist." in answers["refused"]["says"]


def test_its_triton_provider_gets_the_same_by_both_routes(answers: Answers) -> None:
    assert answers["triton_streamed"] == answers["completed"]
    assert answers["triton"] == BEGINNING + answers["completed"]
