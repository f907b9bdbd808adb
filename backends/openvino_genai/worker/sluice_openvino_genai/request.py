"""Inputs of a request, as those of Triton's vLLM backend."""

from dataclasses import replace
from typing import Any

from sluice_llm.request import Inputs, LlmRequest, Mistake

OUTPUTS = (
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
)
"""Optional outputs; each has an input `return_*`."""
UNSERVED = ("image", "embedding_request")
"""Inputs of other LLM backends; a model that does not declare them gets them as parameters."""


def read_request(inputs: Inputs) -> LlmRequest:
    """The request in the tensors; Mistake names a wrong one."""
    for name in UNSERVED:
        if name in inputs or name in inputs.parameters:
            raise Mistake(
                f"input '{name}' is not supported by OpenVINO GenAI models; leave it out, or serve "
                "the model with vLLM",
                "UNSUPPORTED",
            )
    text, messages = inputs.text("text_input"), inputs.json("messages", list)
    if (text is None) == (messages is None):
        found = "neither" if text is None else "both"
        raise Mistake(f"expected one of the inputs 'text_input' and 'messages', got {found}")
    stream, exclude = inputs.flag("stream") is True, inputs.flag("exclude_input_in_output")
    if stream and exclude is False:
        raise Mistake("When streaming, `exclude_input_in_output` = False is not allowed.")
    found = inputs.json("sampling_parameters", dict)
    sampling: dict[str, Any] = inputs.parameters if found is None else found
    llm_request = LlmRequest(
        text=text,
        messages=messages,
        stream=stream,
        # A chat is repeated only on demand: its text is the template's, not the client's.
        echo=not stream and (text is not None if exclude is None else not exclude),
        outputs=frozenset(name for name in OUTPUTS if inputs.flag(f"return_{name}")),
        sampling=sampling,
    )
    inputs.refuse_unread()
    return llm_request


def checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, each with a role and a text; templates write "None" for a missing one."""
    for place, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise Mistake(f"message {place} has no 'role' in 'messages'")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            message["content"] = ""
        elif not isinstance(content, str):
            raise Mistake(
                f"message {place} has the content {str(content)[:40]} in 'messages', expected a "
                "text"
            )
    return messages


def with_default(llm_request: LlmRequest, tokens: int) -> LlmRequest:
    """The request with this limit of new tokens, if it has none."""
    if llm_request.sampling.get("max_tokens") is not None:
        return llm_request
    return replace(llm_request, sampling={**llm_request.sampling, "max_tokens": tokens})
