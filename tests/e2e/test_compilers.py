"""The real model where C++ cannot be compiled, and where a compiler fails."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import environment
from tests.e2e.llama import Llama, write_llama
from tests.serving import Serving, serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def test_an_llm_is_served_without_a_compiler(other_server: Serving) -> None:
    with Llama(other_server) as llama:
        llama.expect_answer()
        sampled = llama.generate(
            text_input="Once",
            parameters={"max_tokens": 4, "temperature": 1.0, "top_k": 5, "logprobs": 2},
            return_logprobs=True,
        )
    assert sampled["text_output"]
    assert other_server.text.count("off: no C++ compiler (no-such-compiler)") == 1


@pytest.mark.parametrize(
    ("compiler", "arguments", "flags", "reason"),
    [
        ("true", {}, (), "InductorError: "),
        ("g++", {"kv_cache_memory_bytes": 1_000_000}, ("--frontends=2",), "ValueError: No avail"),
    ],
    ids=["compiler", "memory-shared"],
)
def test_a_load_that_fails_in_the_engine_names_its_last_error(
    stored_model: Path,
    tmp_path: Path,
    compiler: str,
    arguments: dict[str, Any],
    flags: tuple[str, ...],
    reason: str,
) -> None:
    repository = tmp_path / "repository"
    write_llama(repository, arguments)
    tolerant = ("--exit-on-error=false", "--strict-readiness=false", *flags)
    found = environment(compiler, tmp_path / "cache")
    with serving(repository, *tolerant, environment=found) as server:
        (model,) = httpx.post(f"{server.http}/v2/repository/index").json()
    assert model["state"] == "UNAVAILABLE"
    assert model["reason"].partition("its engine did not start: ")[2].startswith(reason)
    assert "retry shortly" not in server.text
