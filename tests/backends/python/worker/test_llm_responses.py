"""Token counts in the responses of an LLM to OpenAI's clients."""

import json

from sluice_llm.chat import PlainReader
from sluice_llm.deltas import SequenceDelta
from sluice_llm.request import LlmRequest
from sluice_llm.responses import USAGE, OpenAiCall


def test_tokens_without_text_are_counted_with_the_next_response() -> None:
    call = OpenAiCall(
        llm_request=LlmRequest(text="p", stream=True),
        chat=False,
        model="m",
        usage=False,
        decode=str,
        readers=PlainReader,
    )
    counts = []
    for text, ended in (("", None), ("x", None), ("", None), ("y", "stop")):
        change = SequenceDelta(0, text, tokens=1, finish_reason=ended)
        responses = call.responses([change], 10, final=ended is not None)
        counts.append([json.loads(each.parameters()).get(USAGE) for each in responses])
    assert counts == [[], ["10,2,"], [], ["0,2,stop"]]
