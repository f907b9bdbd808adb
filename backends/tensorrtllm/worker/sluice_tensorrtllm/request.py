"""Inputs of a request, as a prompt and arguments of `SamplingParams`."""

from collections.abc import Mapping
from typing import Any

from sluice_llm.request import GUIDE, GUIDE_TYPE, Inputs, LlmRequest, Mistake

_SAME = (
    *("max_tokens", "min_tokens", "top_k", "end_id", "pad_id", "temperature", "top_p", "seed"),
    *("length_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_LLM_API = (
    *("best_of", "top_k", "max_tokens", "temperature", "top_p"),
    *("frequency_penalty", "presence_penalty", "seed"),
)
ONE = {
    **{name: name for name in _SAME},
    **{f"sampling_param_{name}": name for name in _LLM_API},
    "min_length": "min_tokens",
    "random_seed": "seed",
    "num_return_sequences": "n",
    "beam_width": "beam_width",
}
"""Inputs with one value, and the sampling parameter that each is."""
LISTS = {"stop_words": "stop", "sampling_param_stop": "stop", "bad_words": "bad"}
INTEGERS = frozenset(
    {"max_tokens", "min_tokens", "top_k", "end_id", "pad_id", "seed", "n", "best_of", "beam_width"}
)
FLOATS = frozenset(
    {
        *("temperature", "top_p", "top_p_min", "top_p_decay", "min_p", "length_penalty"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    }
)
CLOSED = frozenset(
    {
        *("logits_processor", "apply_batched_logits_processor", "embedding_bias"),
        *("lookahead_config", "guided_decoding", "additional_model_outputs"),
        *("return_context_logits", "return_generation_logits", "return_encoder_output"),
        *("prompt_logprobs", "detokenize"),
        # It changes the one tokenizer, which fails while a thread reads another prompt.
        "truncate_prompt_tokens",
    }
)
"""Members that are code or objects, or that change the outputs: clients cannot set them."""
GUIDES = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Triton's types of guides, and the argument of `GuidedDecodingParams` that each is."""


def read_sampling(inputs: Inputs) -> dict[str, Any]:
    """Sampling parameters of inputs, over those of the JSON or of the request's parameters.

    Other names keep the library's meaning: it refuses unknown ones.
    """
    given = inputs.json("sampling_parameters", dict)
    found = _coerced(inputs.parameters if given is None else given)
    for name, meaning in ONE.items():
        if (value := inputs.one(name)) is not None:
            found[meaning] = value
    for name, meaning in LISTS.items():
        if words := inputs.texts(name):
            found[meaning] = words
    for name in (GUIDE_TYPE, GUIDE):
        if (text := inputs.text(name)) is not None:
            found[name] = text
    return _with_beams(found)


def guided(sampling: dict[str, Any]) -> dict[str, Any]:
    """Move the guide out of the sampling: the arguments of `GuidedDecodingParams`, if any."""
    kind, guide = sampling.pop(GUIDE_TYPE, None), sampling.pop(GUIDE, None)
    if kind is None and guide is None:
        return {}
    if kind == "json":
        return {"json_object": True}
    if kind not in GUIDES:
        known = ", ".join(("json", *GUIDES))
        raise Mistake(f"'{GUIDE_TYPE}' is {kind!r}, expected one of {known}")
    if not guide:
        raise Mistake(f"'{GUIDE_TYPE}' is '{kind}', which needs '{GUIDE}'")
    return {GUIDES[kind]: guide}


def end_beside_words(sampling: dict[str, Any]) -> None:
    """Make the end token one of the stop tokens.

    With an `end_id` the library does not tokenise words, and refuses them. A negative one is
    `ignore_eos`.
    """
    if not (sampling.get("stop") or sampling.get("bad")):
        return
    end = sampling.pop("end_id", None)
    if end is not None and end < 0:
        sampling["ignore_eos"] = True
    elif end is not None:
        sampling["stop_token_ids"] = [*(sampling.get("stop_token_ids") or ()), end]


def revises(sampling: Mapping[str, Any]) -> bool:
    """Whether made tokens may not be part of the answer."""
    best = sampling.get("best_of", 0)
    return bool(sampling.get("use_beam_search")) or best > sampling.get("n", 1)


def _coerced(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters under the library's names; numbers may be texts, as Triton's clients send them."""
    found = {}
    for name, value in given.items():
        meaning = ONE.get(name) or LISTS.get(name) or name
        if meaning in CLOSED or meaning.startswith("_"):
            raise Mistake(f"sampling parameter '{name}' cannot be set by clients", "UNSUPPORTED")
        value = _number(meaning, value) if isinstance(value, str) else value
        if value is not None or meaning not in INTEGERS | FLOATS:
            _check_kind(meaning, value)
            found[meaning] = value
    return found


def _check_kind(name: str, value: Any) -> None:
    if name in INTEGERS and type(value) is not int:
        raise Mistake(f"sampling parameter '{name}' is {value!r}, expected a whole number")
    if name in FLOATS and type(value) not in (int, float):
        raise Mistake(f"sampling parameter '{name}' is {value!r}, expected a number")


def _number(name: str, text: str) -> Any:
    try:
        if name in INTEGERS:
            return int(text)
        return float(text) if name in FLOATS else text
    except ValueError:
        raise Mistake(f"sampling parameter '{name}' is {text!r}, expected a number") from None


def _with_beams(sampling: dict[str, Any]) -> dict[str, Any]:
    """Triton's beam width in the library's terms."""
    width = sampling.pop("beam_width", 1)
    if width > 1:
        sampling.update(use_beam_search=True, best_of=width, n=sampling.get("n", width))
    return sampling


FLAGS = {
    "finish_reason": ("return_finish_reason",),
    "stop_reason": ("return_stop_reason",),
    "cumulative_logprob": ("return_cumulative_logprob",),
    "log_probs": ("return_log_probs",),
    "logprobs": ("return_logprobs",),
    "num_input_tokens": ("return_num_input_tokens",),
    "num_output_tokens": ("return_num_output_tokens",),
    "perf_metrics": ("return_perf_metrics", "sampling_param_return_perf_metrics"),
}
"""Optional outputs, and the inputs that ask for each."""


def read_request(inputs: Inputs) -> LlmRequest:
    """The request in the tensors; Mistake names a wrong one."""
    text, messages = inputs.text("text_input"), inputs.json("messages", list)
    if (text is None) == (messages is None):
        found = "neither" if text is None else "both"
        raise Mistake(f"expected one of the inputs 'text_input' and 'messages', got {found}")
    stream = inputs.flag("stream", "streaming") is True
    exclude = inputs.flag("exclude_input_in_output", "sampling_param_exclude_input_from_output")
    if stream and exclude is False:
        raise Mistake("When streaming, `exclude_input_in_output` = False is not allowed.")
    sampling = read_sampling(inputs)
    if (adapter := inputs.text("lora_name")) is not None:
        sampling["lora_name"] = adapter
    llm_request = LlmRequest(
        text=text,
        messages=messages,
        stream=stream,
        # A chat is repeated only on demand: its text is the template's, not the client's.
        echo=not stream and (text is not None if exclude is None else not exclude),
        outputs=frozenset(name for name, flags in FLAGS.items() if inputs.flag(*flags)),
        sampling=sampling,
        lora_number=inputs.one("lora_task_id"),
    )
    inputs.refuse_unread()
    return llm_request
