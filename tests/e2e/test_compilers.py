"""The real model where C++ cannot be compiled."""

import pytest

from tests.e2e.llama import Llama
from tests.serving import Serving

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
    for each in other_server.hosts or (other_server,):
        assert each.text.count("off: no C++ compiler (no-such-compiler)") == 1
