"""Members of an OpenAI request, in the engine's terms."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from .chat import Tools
from .request import GUIDE, GUIDE_TYPE, LORA_NAME, LlmRequest, Mistake

NUMBERS = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (int, float)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (int, float)),
    **dict.fromkeys(("n", "seed", "top_k", "min_tokens", "max_tokens"), (int,)),
}
"""Members that the engine knows by the same name."""
MOST_LOGPROBS = 20
"""OpenAI's limit."""
DEFAULTS = {"temperature": 1.0}
"""OpenAI's defaults that differ from the engine's."""
REFUSED: Mapping[str, Any] = {
    **dict.fromkeys(("functions", "logit_bias", "bad_words", "allowed_token_ids")),
    **dict.fromkeys(("prompt_logprobs", "logprob_token_ids", "thinking_token_budget")),
    **dict.fromkeys(("truncate_prompt_tokens", "repetition_detection", "watermarking")),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "cache_salt", "vllm_xargs")),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "return_prompt_text")),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "return_token_offsets")),
    "best_of": 1,
    "length_penalty": 1,
    "priority": 0,
    "spaces_between_special_tokens": True,
    "stream_interval": 1,
    "use_beam_search": False,
}
"""Members of vLLM's server that are not served, and values that ask for nothing, as empty ones."""
REFUSED_CHAT: Mapping[str, Any] = {
    **dict.fromkeys(("chat_template", "continue_final_message", "documents", "echo")),
    "add_special_tokens": False,
}
REFUSED_COMPLETION: Mapping[str, Any] = {
    **dict.fromkeys(("prompt_embeds", "suffix", "tools")),
    "add_special_tokens": True,
}
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
"""Members that are true or false, and that the engine knows by the same name."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
STRUCTURES = {
    "json": "json_schema",
    "json_object": "json",
    "regex": "regex",
    "grammar": "ebnf_grammar",
    "choice": "choice",
    "structural_tag": "structural_tag",
}
"""Members of `structured_outputs`, and the type of guide that each is."""
NO_VARIABLES = frozenset(
    {
        *("chat_template", "tools", "documents", "tokenize", "return_dict", "return_tensors"),
        *("padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "conversation"),
    }
)
"""Arguments of a tokenizer that are no template variables: clients cannot set them."""


def read_body(body: Mapping[str, Any], *, chat: bool, adapters: Collection[str]) -> LlmRequest:
    """The request in a body; Mistake names a wrong member."""
    _refuse_unserved(body, {**REFUSED, **(REFUSED_CHAT if chat else REFUSED_COMPLETION)})
    stream = _typed(body, "stream", bool, "true or false") or False
    options = _typed(body, "stream_options", dict, "an object") or {}
    if options and not stream:
        raise Mistake("`stream_options` can only be used when `stream` is True")
    _refuse_unserved(options, {"continuous_usage_stats": False})
    tools = read_tools(body) if chat else None
    sampling = {**_sampling(body), **_guide(body), **_forced(body, tools)}
    if (top := top_logprobs(body, chat=chat)) is not None:
        sampling["logprobs"] = max(top, 1)  # 0 has meant none to some versions of the library
    if body.get("model") in adapters:
        sampling[LORA_NAME] = body["model"]
    if chat:
        return _chat(body, tools, stream, sampling)
    return _completion(body, stream, sampling)


def _refuse_unserved(body: Mapping[str, Any], unserved: Mapping[str, Any]) -> None:
    for name in unserved.keys() & body.keys():
        value = body[name]
        if value in (None, unserved[name], "", [], {}) or (value is False and not unserved[name]):
            continue
        raise Mistake(f"'{name}' is not supported for this model; leave it out", "UNSUPPORTED")


def _chat(
    body: Mapping[str, Any], tools: Tools | None, stream: bool, sampling: Mapping[str, Any]
) -> LlmRequest:
    messages = _typed(body, "messages", list, "a list")
    if not messages:
        raise Mistake("'messages' is missing or empty, expected a list of messages")
    template = _typed(body, "chat_template_kwargs", dict, "an object") or {}
    if closed := NO_VARIABLES & template.keys():
        raise Mistake(f"'chat_template_kwargs' has '{min(closed)}', which clients cannot set")
    template = {**_template_members(body), **template}
    if tools is not None:
        template["tools"] = tools.definitions
    return LlmRequest(messages=messages, template=template, stream=stream, sampling=sampling)


def _template_members(body: Mapping[str, Any]) -> dict[str, Any]:
    """Members that are variables of the template, as vLLM sets them."""
    found: dict[str, Any] = {}
    if _typed(body, "add_generation_prompt", bool, "true or false") is False:
        found["add_generation_prompt"] = False
    if (effort := body.get("reasoning_effort")) is not None:
        if effort not in EFFORTS:
            raise Mistake(
                f"'reasoning_effort' is {_shown(effort)}, expected one of {', '.join(EFFORTS)}"
            )
        found["reasoning_effort"] = effort
        found["enable_thinking"] = effort != "none"
    return found


def _completion(body: Mapping[str, Any], stream: bool, sampling: Mapping[str, Any]) -> LlmRequest:
    text, tokens = _prompt(body.get("prompt"))
    echo = bool(_typed(body, "echo", bool, "true or false"))
    if echo and text is None:
        raise Mistake("'echo' needs a 'prompt' that is a text")
    if echo and "logprobs" in sampling:
        raise Mistake("'logprobs' of an 'echo' are not supported: ask for one of them")
    return LlmRequest(text=text, tokens=tokens, stream=stream, echo=echo, sampling=sampling)


def top_logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """The number of likeliest tokens to return in each place; None: no log probabilities."""
    if not chat:
        return _top(body, "logprobs")
    wanted = _typed(body, "logprobs", bool, "true or false")
    top = _top(body, "top_logprobs")
    if top and not wanted:
        raise Mistake("'top_logprobs' needs 'logprobs' to be true")
    return top or 0 if wanted else None


def _top(body: Mapping[str, Any], name: str) -> int | None:
    found: int | None = _typed(body, name, int, "an integer")
    if found is not None and not 0 <= found <= MOST_LOGPROBS:
        raise Mistake(f"'{name}' is {found}, expected 0 to {MOST_LOGPROBS}")
    return found


def read_tools(body: Mapping[str, Any]) -> Tools | None:
    """The tools of a chat; None if it has none."""
    definitions = _typed(body, "tools", list, "a list")
    choice = body.get("tool_choice")
    if not definitions and choice not in (None, "none"):
        raise Mistake(f"'tool_choice' is {_shown(choice)}, which needs 'tools'")
    if not definitions or choice == "none":
        return None
    names = [_function_name(each) for each in definitions]
    if None in names:
        raise Mistake(
            f"'tools' has {_shown(definitions[names.index(None)])}, expected the type function "
            "with a function that has a name"
        )
    parallel = _typed(body, "parallel_tool_calls", bool, "true or false") is not False
    if choice in (None, "auto"):
        return Tools(definitions, parallel=parallel)
    if choice == "required":
        raise Mistake(
            "'tool_choice' is \"required\", which is not supported for this model; name "
            "the function, or leave the choice to the model",
            "UNSUPPORTED",
        )
    if (name := _function_name(choice)) not in names or name is None:
        raise Mistake(f"'tool_choice' is {_shown(choice)}, expected a function of 'tools'")
    return Tools(definitions, named=name)


def _function_name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name and tool.get("type") == "function" else None


def _forced(body: Mapping[str, Any], tools: Tools | None) -> dict[str, Any]:
    """The guide for a named function: its arguments follow its schema."""
    if tools is None or not tools.named:
        return {}
    for name in ("response_format", "structured_outputs"):
        if body.get(name):
            raise Mistake(f"'{name}' and a function in 'tool_choice' exclude each other")
    found = next(each for each in tools.definitions if _function_name(each) == tools.named)
    schema = found["function"].get("parameters")
    if schema is not None and not isinstance(schema, dict):
        raise Mistake(f"'tools' has the parameters {_shown(schema)}, expected an object")
    if not schema:
        return {GUIDE_TYPE: "json"}
    return {GUIDE_TYPE: "json_schema", GUIDE: json.dumps(schema)}


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(DEFAULTS)
    for name, kinds in NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds):
            expected = "an integer" if kinds == (int,) else "a number"
            raise Mistake(f"'{name}' is {_shown(value)}, expected {expected}")
        found[name] = value
    if (longest := _typed(body, "max_completion_tokens", int, "an integer")) is not None:
        found["max_tokens"] = longest
    for name in FLAGS:
        if (flag := _typed(body, name, bool, "true or false")) is not None:
            found[name] = flag
    if ends := _typed(body, "stop_token_ids", list, "a list of tokens"):
        found["stop_token_ids"] = ends
    return {**found, **_stop(body.get("stop"))}


def _stop(stop: Any) -> dict[str, Any]:
    words = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(words, list) or not all(isinstance(each, str) for each in words):
        raise Mistake(f"'stop' is {_shown(stop)}, expected a text or a list of texts")
    return {"stop": words} if words else {}


def _guide(body: Mapping[str, Any]) -> dict[str, Any]:
    """The guide in `response_format` or `structured_outputs`."""
    guide = _response_format(body.get("response_format"))
    given = _typed(body, "structured_outputs", dict, "an object") or {}
    wanted = {name: value for name, value in given.items() if value is not None}
    if not wanted:
        return guide
    if guide:
        raise Mistake("'response_format' and 'structured_outputs' exclude each other")
    if len(wanted) > 1 or not wanted.keys() <= STRUCTURES.keys():
        raise Mistake(
            f"'structured_outputs' is {_shown(given)}, expected one of {', '.join(STRUCTURES)}"
        )
    ((name, value),) = wanted.items()
    if name == "json_object":
        return {GUIDE_TYPE: STRUCTURES[name]} if value else {}
    if name != "choice" and not isinstance(value, str):
        value = json.dumps(value)
    return {GUIDE_TYPE: STRUCTURES[name], GUIDE: value}


def _response_format(wanted: Any) -> dict[str, Any]:
    if wanted is None:
        return {}
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {GUIDE_TYPE: "json"}
    schema = wanted.get("json_schema") if kind == "json_schema" else None
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if not isinstance(schema, dict):
        raise Mistake(
            f"'response_format' is {_shown(wanted)}, expected the type text, json_object, or "
            "json_schema with a schema"
        )
    return {GUIDE_TYPE: "json_schema", GUIDE: json.dumps(schema)}


def _prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """One text, or one list of tokens."""
    found = prompt[0] if isinstance(prompt, list) and _is_nested(prompt) else prompt
    if isinstance(found, str):
        return found, None
    if isinstance(found, list) and found and all(type(each) is int for each in found):
        return None, found
    raise Mistake(f"'prompt' is {_shown(prompt)}, expected one text or one list of tokens")


def _is_nested(prompt: list[Any]) -> bool:
    return len(prompt) == 1 and isinstance(prompt[0], str | list)


def _typed(body: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    found = body.get(name)
    if found is not None and type(found) is not kind:
        raise Mistake(f"'{name}' is {_shown(found)}, expected {expected}")
    return found


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]
