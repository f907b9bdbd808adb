"""Every member of vLLM's OpenAI requests is served or refused by name."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sluice_llm.openai_request import read_body
from sluice_llm.request import Mistake

from backends.openvino_genai.worker.sluice_openvino_genai.sampling import read_sampling

CHAT = {"messages": [{"role": "user", "content": "a"}]}
COMPLETION = {"prompt": "a"}
TOOL = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "note"}}
SERVED: dict[str, Any] = {
    "add_generation_prompt": False,
    "chat_template_kwargs": {"a": 1},
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "min_p": 0.5,
    "min_tokens": 1,
    "n": 2,
    "presence_penalty": 0.5,
    "reasoning_effort": "low",
    "repetition_penalty": 1.5,
    "response_format": {"type": "json_object"},
    "seed": 1,
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_token_ids": [1],
    "stream": True,
    "structured_outputs": {"regex": "a"},
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
}
"""Members that change the request, with a value that does."""
TOGETHER = {"logprobs", "top_logprobs", "tools", "tool_choice", "stream_options"}
"""Members that need another one."""
COMPLETIONS_ONLY = {"echo": True}
PROMPTS = {"messages", "prompt", "model"}
NO_EFFECT = {
    # Labels, and wishes of what this model has not.
    *("user", "request_id", "session_id", "include_reasoning", "parallel_tool_calls"),
    # Of members that are refused.
    *("truncation_side", "routed_experts_prompt_start", "mm_payload", "return_mm_kwargs"),
}
REFUSED: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "best_of": 2,
    "cache_salt": "x",
    "ec_transfer_params": {"a": 1},
    "functions": [{"name": "a"}],
    "kv_transfer_params": {"a": 1},
    "length_penalty": 2.0,
    "logit_bias": {"1": 1},
    "logprob_token_ids": [1],
    "media_io_kwargs": {"a": {}},
    "mm_processor_kwargs": {"a": 1},
    "priority": 1,
    "prompt_logprobs": 0,
    "repetition_detection": {"a": 1},
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens_as_token_ids": True,
    "spaces_between_special_tokens": False,
    "stream_interval": 5,
    "thinking_token_budget": 9,
    "truncate_prompt_tokens": 9,
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}
REFUSED_IN_CHATS = {
    "add_special_tokens": True,
    "chat_template": "x",
    "continue_final_message": True,
    "documents": [{"title": "a"}],
    "echo": True,
}
REFUSED_IN_COMPLETIONS = {
    "add_special_tokens": False,
    "prompt_embeds": "AAAA",
    "suffix": "x",
    "tools": [TOOL],
}
NEUTRAL = {
    "add_special_tokens": None,
    "best_of": 1,
    "logit_bias": {},
    "bad_words": [],
    "length_penalty": 1.0,
    "use_beam_search": False,
    "return_token_ids": False,
    "documents": None,
    "priority": 0,
    "spaces_between_special_tokens": True,
    "structured_outputs": {},
    "tool_choice": "none",
}


def read(body: dict[str, Any], **members: Any) -> Any:
    return read_body({**body, **members}, chat="messages" in body, adapters=())


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_member_that_cannot_be_served_is_refused(body: dict[str, Any], name: str) -> None:
    assert_refused(body, name, REFUSED[name])


@pytest.mark.parametrize("name", REFUSED_IN_CHATS)
def test_a_member_that_chats_cannot_have_is_refused(name: str) -> None:
    assert_refused(CHAT, name, REFUSED_IN_CHATS[name])


@pytest.mark.parametrize("name", REFUSED_IN_COMPLETIONS)
def test_a_member_that_completions_cannot_have_is_refused(name: str) -> None:
    assert_refused(COMPLETION, name, REFUSED_IN_COMPLETIONS[name])


@pytest.mark.parametrize("name", SERVED)
def test_a_member_that_is_served_changes_the_request(name: str) -> None:
    served = read(CHAT, **{name: SERVED[name]})
    assert served != read(CHAT)
    read_sampling(served.sampling, counted=False)


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_member_that_asks_for_nothing_is_accepted(name: str) -> None:
    assert read(CHAT, **{name: NEUTRAL[name]}) == read(CHAT)


def test_no_member_of_vllms_requests_is_unknown() -> None:
    known = {*SERVED, *TOGETHER, *COMPLETIONS_ONLY, *PROMPTS, *NO_EFFECT, *REFUSED}
    known |= {*REFUSED_IN_CHATS, *REFUSED_IN_COMPLETIONS}
    assert vllms_members() - known == set()


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_a_choice_of_tools_needs_tools(choice: Any) -> None:
    with pytest.raises(Mistake, match="which needs 'tools'"):
        read(CHAT, tool_choice=choice)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json_object": True}, "json_schema", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"choice": ["a", "b"]}, "grammar", 'root ::= "a" | "b"'),
    ],
)
def test_structured_outputs_are_those_of_vllm(given: Any, kind: str, text: str) -> None:
    sampling = read(CHAT, structured_outputs=given).sampling
    structure = read_sampling(sampling, counted=False).structure
    assert structure is not None
    assert (structure.kind, structure.text) == (kind, text)


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({"structured_outputs": {"rejex": "a"}}, "'structured_outputs' is"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "expected one of json"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "exclude each other",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": NAMED},
            "exclude each other",
        ),
        ({"reasoning_effort": "huge"}, "'reasoning_effort' is \"huge\", expected one of none"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "'continuous_usage_stats' is not supported",
        ),
        ({"stop_token_ids": 5}, "'stop_token_ids' is 5, expected a list of tokens"),
    ],
)
def test_wrong_members_are_refused(members: dict[str, Any], error: str) -> None:
    with pytest.raises(Mistake, match=error):
        read(CHAT, **members)


def test_an_effort_is_a_variable_of_the_template_as_in_vllm() -> None:
    assert read(CHAT, reasoning_effort="none").template == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    assert read(CHAT, reasoning_effort="high", **given).template["enable_thinking"] is False


def assert_refused(body: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(Mistake, match=f"^'{name}' is not supported .*; leave it out$") as refused:
        read(body, **{name: value})
    assert refused.value.code == "UNSUPPORTED"


def vllms_members() -> set[str]:
    """The fields in the source of vLLM, whose import takes many seconds."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vllm is not installed")
    folder = Path(found.origin).parent / "entrypoints" / "openai"
    names = {"chat_completion": "ChatCompletionRequest", "completion": "CompletionRequest"}
    return {
        field.target.id
        for module, name in names.items()
        for made in ast.parse((folder / module / "protocol.py").read_text()).body
        if isinstance(made, ast.ClassDef) and made.name == name
        for field in made.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if not field.target.id.startswith("_")
    }
